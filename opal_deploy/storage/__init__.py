"""Files in object storage and on web servers, by URL, through fsspec.

Start with `urls`, which tells a URL from a path and removes secrets from it. `filesystem` opens file systems, retries
temporary failures, and turns their exceptions into an ImageError. `files` reads; `buckets` lists and writes.
"""
