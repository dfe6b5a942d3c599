"""Labelled data sets: official layouts and plain image folders, read and checked before the first epoch.

Start at `registry.read_dataset`: from a folder to a checked `samples.DataSet`. Nothing here opens pixels for training;
a sample is a path, a label and possibly a box.

    registry               the known data sets: finds the adapter, reads, checks, splits
    samples                DataSet, Sample, the stratified split, wording of messages
    listing                Listing and Adapter; readers of official lists and their usual errors
    checks                 missing, unreadable, unlisted and duplicate files
    image_folder           one folder per class; Caltech-101
    cub, dogs, imagenet    data sets whose lists are read here; cub100 is in `cub`
    torchvision_datasets   cars, pets, flowers, dtd and sun397, whose lists torchvision reads
    boxes                  boxes that data sets publish, for `--boxes`
    masks                  masks of COCO files and of pets

How to add a data set: write a module with

1. a docstring that shows the files as officially unpacked and says where the splits come from,
2. `_is_<name>(folder) -> bool`, true only for a folder that is unmistakably this data set,
3. `_read_<name>(folder) -> Listing` (with partitions, `(folder, partition)`), which reads the official lists, raises
   UsageError for absent or damaged files, and lists all other problems in `Listing.problems`,
4. `<NAME> = Adapter(...)`, which `registry` adds to the known ones.

Checks, splits and messages then work as for all other data sets.
"""
