"""Sources of images: folders, globs, lists, single files and archives; boxes and labels from other files.

Start with `discovery.discover`, which turns the inputs of a call into `InputImage`s, lazily and in a fixed order.
`archives` reads archives; `buckets` finds images by URL; `video` replaces videos with their frames, and lists the codes
of their errors; `annotations` and `detections` read boxes and labels.

Inputs that cannot be read become images with an error, of one of these codes:

    no_images            no file in it has an image's name
    unreadable           the system refuses to list or read it
    storage_unavailable  a bucket or server did not answer for a while, or reported overload
    corrupt_archive      members before the damage come before this one
    unsupported_archive  an archive of an unsupported kind
    encrypted_member     a zip's member needs a password
    oversized_member     a member is, or claims to be, larger than any reasonable image
    unsupported_member   unsupported compression or storage
"""
