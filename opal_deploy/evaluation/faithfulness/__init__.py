"""Are the cells that a model names as evidence what it answers from? Measured by taking them away.

Everything here works on the model's input, uint8 [N, H0, W0, 3] before normalisation, through any session. A cell is
removed by painting its rectangle of the input over; what is measured is the cosine of the class that the untouched
image was answered with. Cells of a convolutional network also see their surroundings, so a rectangle is where a score
was read, not all that went into it: therefore every figure stands beside controls that remove as many other cells.
"""
