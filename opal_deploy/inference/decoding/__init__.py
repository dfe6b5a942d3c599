"""From an `InputImage` to a `Prepared`: images are read, decoded, cropped and resized, ahead of the session.

`prepare` does it for one image: start there. The others do it for many at a time:

    pool      threads, or a worker process for each thread (`isolate`)
    slots     where the pixels go: batches in memory that the processes share
    budget    how many pixels are decoded at a time
"""
