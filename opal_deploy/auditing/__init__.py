"""Checks of recorded explanations, and comparisons of two models or of two results.

`verify`, `diff` and `drift` do the work of the commands, and `pages` writes their pages. `convert` exports results,
`inspection` and `card` describe a model file. `verify_records` computes records again, `record_diff` compares them
field by field, and `results` is the one reader of runs.
"""
