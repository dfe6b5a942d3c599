"""Sources of images: folders, globs, lists, files, archives and buckets; boxes and labels from other files.

Start with `discovery.discover`, which turns the inputs of a call into `InputImage`s, lazily and in a fixed order.
`archives` reads archives; `video` replaces videos with their frames, and lists the codes of their errors; `annotations`
reads boxes and labels.

Inputs that cannot be read become images with an error, of one of these codes:

    no_images            no file in it has an image's name
    unreadable           the system refuses to list or read it
    archive_changed      it was changed while its members were read, and `infer` stops
    storage_unavailable  a bucket did not answer, or reported overload
    corrupt_archive      members before the damage come before this one
    unsupported_member   a zip's member needs a password, or is compressed by an unsupported method
"""
