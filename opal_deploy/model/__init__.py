"""The OPAL network in PyTorch: start at `network`; the method itself is in `head`.

`backbones` cuts torchvision and timm classifiers, `config` describes a network as plain data, `checkpoint` reads and
writes our files and reads the paper authors', `graph` is the network as it is deployed.
"""
