"""Drawings of records and outputs. The package decides nothing and runs no model.

`overlay` draws evidence boxes and a caption on a photograph; `sheet` makes the evidence sheet of one image, `report`
the page of a run, `atlas` the patches that slots stand for. `boxes` and `style` are shared. Needs NumPy, Pillow and
Jinja2.
"""
