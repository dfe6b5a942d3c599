"""Training of OPAL networks and of the linear head.

Start at `api.train_model`, which the command calls, and `loop.fit`: from a data set and options to a run directory.

    options        every option once, recipes; imports no torch
    loop           prepare, fit the head, choose the stride, an epoch, validate
    head_fit       the head fitted to the frozen network
    losses         cross-entropy and the terms of the attention
    images         decoded and augmented images in batches; augmentation, regions
    balance        weights and warnings for unbalanced and small classes
    network        the network that a run starts with
    measure        outputs and measurements of a network
    run_directory  files and records of a run, the same run or another; checkpoints writes best.pt and last.pt
    machine        processes, device and precision, by Lightning Fabric
    cost           what a run will cost
    reproduce      the paper's tables (paper.toml): missing runs, our metrics next to the paper's
"""
