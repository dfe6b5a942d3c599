"""The evidence sheet of one image, the predicted class next to the runner-up, as PNG or SVG.

`content` holds the figures and sentences, `layout` places them on a `canvas`, `drawing` renders the result.
`opal_deploy.run.drawing.SheetBuilder` does all of this for an inference result.
"""
