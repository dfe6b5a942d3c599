"""From a file to a model's input, the same pixels everywhere: training, evaluation and every runtime use this package.

`decode` reads one image, `geometry` maps cells to pixels of the image, `resize` makes the input.
"""
