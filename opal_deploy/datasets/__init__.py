"""Labelled data sets: official layouts and folders of a user's own, read and checked before the first epoch.

Start at `registry.read_dataset`: from a folder to a checked `samples.DataSet`. To add a data set, write a
`samples.Adapter` whose `read` turns a folder into a `samples.Listing`, and add it to `registry`; checks, splits and
messages then work as for all others.
"""
