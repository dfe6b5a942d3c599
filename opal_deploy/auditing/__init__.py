"""Checks of recorded explanations, and comparisons of two models or of two results.

`verify` and `diff` do the work of the commands, `convert` exports results. `verify_records` computes records again and
`record_diff` compares them field by field, `model_diff` compares two sets of records, `results` reads results.
"""
