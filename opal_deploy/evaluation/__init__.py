"""Evaluation of models: accuracy, explanation metrics, faithfulness, risk over coverage.

Start at `api.evaluate_model`: `inputs` checks models, data and options, `measure` measures one model after another,
`result` is what is returned, `files` writes it.
"""
