"""Faithfulness of the evidence: what removing the evidence cells from the input costs, beside controls.

Everything here works on the model's input, uint8 [N, H0, W0, 3] before normalisation, through any session. A cell is
removed by painting its rectangle of the input with a baseline; measured is the cosine of the class predicted for the
unchanged image. A cell's receptive field is larger than its rectangle, so every figure stands beside controls that
remove as many other cells. Start at `measure.measure_faithfulness`.
"""
