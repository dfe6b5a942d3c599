"""Labelled data sets: official layouts and folders of a user's own, read and checked before the first epoch.

Start at `registry.read_dataset`: from a folder to a checked `samples.DataSet`. To add a data set, write a function from
its folder to a `DataSet`, and add it to the table in `registry`; checks, splits and messages then work as for all.
"""
