"""Training of OPAL networks and of the linear head.

Start at `api.train_model`, which the command calls, and `loop.fit`: from a data set and options to a run directory.

    options        every option once, recipes; imports no torch
    loop           prepare, fit the head, an epoch, validate; the learning rate and the best epoch; background images
    network        a run, the network that it starts with, and what the run will cost, said before the first step
    head_fit       the head fitted to features of the frozen network, at a learning rate of its own
    out_of_fold    answers to training images by heads that had not seen them, and the labels that they contradict
    losses         cross-entropy and the terms of the attention
    images         decoded and augmented images in batches; regions that the attention is kept off
    run_directory  files and records of a run
    checkpoints    what is measured for best.pt and last.pt, writing them, and resuming
    machine        processes, device and precision, by Lightning Fabric
    reproduce      the paper's tables (paper.toml): missing runs, our metrics next to the paper's
"""
