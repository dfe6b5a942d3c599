"""Evaluation of models: accuracy, explanation metrics, faithfulness, risk over coverage.

Start at `api.evaluate_model`. `inputs` checks models, data and options, `measure` measures one model after the other,
`result` is what comes back; `session` runs any model on labelled images; `metrics`, `consistency`, `parts` and
`pointing` define the figures; `annotations` says where evidence should lie; `faithfulness` removes evidence from
images; `report` writes the files of `evaluate --out`, `record` into the model's own file.
"""
