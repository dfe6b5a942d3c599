"""From a file to a model's input, the same pixels everywhere: training, evaluation and every runtime use this package.

`decode` reads one image, `geometry` has the part of it that the model sees and where a cell lies on it, `resize` makes
the input. `accelerated` wraps libraries that do Pillow's work faster.
"""
