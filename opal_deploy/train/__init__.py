"""Training of OPAL networks and of the linear head.

Start at `api.train_model`, which the command calls, and `loop.fit`: from a data set and a recipe's options to a run
directory with a checkpoint.

    options, recipe      options of a run, TOML recipes; plain data, imports no torch
    loop                 `fit`: the epochs, the best weights, the test
    balance              weights and warnings for unbalanced and small classes
    epoch                the training step, a pass over the training images, evaluation
    images               batches of decoded and augmented images
    checks               refusals before torch is imported and images are read
    run_directory        the files of a run and its records; imports no torch
    checkpoints          best.pt and last.pt, and the progress that they hold
    resume               comparing and restoring a stored run
    machine              processes, devices, precision, workers
    reproduce            the paper's tables (paper.toml): missing runs, our metrics beside the paper's
"""
