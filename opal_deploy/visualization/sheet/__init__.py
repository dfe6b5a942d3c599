"""The evidence sheet of one image, the predicted class beside the runner-up, as PNG or SVG.

`content` computes what a sheet says from a forward pass's outputs, `captions` puts it into sentences, `layout` places
it with the `images` on a drawing, and `rendering` writes the drawing. `opal_deploy.inference.sheets.SheetBuilder` does
all of it for an inference result.
"""
