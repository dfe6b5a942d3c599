"""What can hold images: folders, lists, and archives, read lazily and in a fixed order. `discover` puts them together.

What cannot be read is an item with a problem, of one of these codes:

    no_images            nothing in it, or none of it, is an image by its name
    unreadable           the system refuses to list or read it
    corrupt_archive      its members up to the damage are items before this one
    unsupported_archive  of a kind that is not read
    encrypted_member     a zip's member needs a password
    oversized_member     a member is, or claims to be, larger than any picture within reason
    unsupported_member   compressed or stored in a way that is not read
"""
