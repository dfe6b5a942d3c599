"""Checks of recorded explanations, and comparisons of two models or of two results.

`verify`, `diff`, `drift` and `convert` do the work of the commands, and `options`, which is light to import, has their
options. `inspection` describes a model file. `verify_records` computes records again, `record_diff` compares
them field by field, and `results` is the one reader of runs.
"""
