"""Sources of images: folders, globs, lists, single files and archives; boxes and labels from other files.

Start with `discovery.discover`, which turns the inputs of a call into `items.Item`s, lazily and in a fixed order.
`archives`, with `tar`, `zip`, `members` and `byte_ranges`, reads archives; `video` puts frames in the place of videos
(`preprocess.video` has the codes of their problems); `annotations` reads boxes and labels.

What cannot be read is an item with a problem, of one of these codes:

    no_images            it holds nothing that is an image by its name
    unreadable           the system refuses to list or read it
    storage_unavailable  a bucket or server answered nothing for a while, or that it is overloaded
    corrupt_archive      its members up to the damage are items before this one, those of a compressed tar are not
    unsupported_archive  of a kind that is not read
    encrypted_member     a zip's member needs a password
    oversized_member     a member is, or claims to be, larger than any image within reason
    unsupported_member   compressed or stored in a way that is not read, a device, or a link that leads nowhere
"""
