"""Evaluation of a model: accuracy, explanation metrics, faithfulness, risk over coverage.

Start at `api.evaluate_model`: `inputs` reads the images with their annotations and checks model, data and options,
`measure` calls one module per measurement, each over the loop of `session`, and returns the figures; `record` stores
them in the model's own file.
"""
