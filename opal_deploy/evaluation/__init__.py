"""Evaluation of a model: accuracy, explanation metrics, faithfulness, risk over coverage.

Start at `api.evaluate_model`: `inputs` checks model, data and options, `measure` calls one module per measurement, each
over the loop of `session`. `result` is what is returned and written, `record` what the model's own file keeps.
"""
