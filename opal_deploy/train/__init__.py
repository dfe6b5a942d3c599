"""Training of OPAL networks and of the linear baseline.

Start at `api.train_model`, which the command calls, and `loop.fit`: from a data set and a recipe's options to a run
directory with a checkpoint.

    recipe               options of a run, TOML recipes; plain data, imports no torch
    loop                 `fit`: the epochs, the best weights, the test
    epoch                one pass over the training images; the training step
    images, transforms   batches of decoded and augmented images
    validation           a network's metrics on labelled images
    run_directory        the files of a run
    checkpoint_manager   when and what a run writes
    resume               everything that last.pt stores for continuing a run
    setup                choices that depend on the machine: precision, workers, weights
    distributed          several processes of one run
    reproduce            the paper's tables
"""
