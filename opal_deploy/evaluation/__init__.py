"""Evaluation of models: accuracy, explanation metrics, faithfulness, risk over coverage.

`session.evaluate_session` measures any runnable model on a labelled data set; `metrics`, `consistency`, `parts` and
`pointing` define the figures; `annotations` says where evidence should lie; `faithfulness` removes evidence from
images; `report` writes the files of `evaluate --out`, `record` into the model's own file.
"""
