"""Files in object storage and on web servers, by URL, through fsspec.

Start with `urls`, which tells a URL from a path and what of it may be shown. `filesystem` opens the file systems,
repeats what failed for the moment, and turns their exceptions into an ImageError. `files` reads, `listing` lists.
"""
