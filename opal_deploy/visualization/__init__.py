"""Drawings of records and outputs for people to look at. The package decides nothing and runs no model.

`overlay` draws the evidence boxes on a photograph with a `legend`; `sheet` makes the evidence sheet of one image,
`report` the page of a whole run, `atlas` the patches that each slot stands for. `palette`, `text` and `slot_names` are
shared. Needs NumPy, Pillow and Jinja2 only.
"""
