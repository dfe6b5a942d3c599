"""The OPAL network in PyTorch: start at `network`; the method itself is in `head` and `distances`.

`backbones` cuts torchvision's classifiers, `config` is the plain-data description of a network, `checkpoint` reads and
writes our files and reads those of the paper's authors.
"""
