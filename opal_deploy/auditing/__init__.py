"""Checks of recorded explanations, and comparisons of two models or of two results.

`verify_records` computes the records of a results.jsonl again, and `record_diff` says, field by field, whether the old
record equals the new one. `model_diff` says what changed between two sets of records of the same images, and
`model_diff_page` shows it in HTML. `results_reader` reads the files of records, `record_sources` finds their images.
"""
