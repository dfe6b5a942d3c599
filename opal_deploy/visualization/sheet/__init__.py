"""The evidence sheet of one image, the predicted class and the runner-up, as PNG or SVG.

`content` holds the figures and sentences, `layout` places them, `drawing` renders the result.
`opal_deploy.run.drawing.SheetBuilder` does all of this for an inference result.
"""
