"""The atlas: for each class and slot, the patches of a training set that showed it best. Numpy and Pillow only."""
