"""From a `Request` to a `Prepared`: images are read, decoded, cropped and resized, ahead of the session.

`prepare` does it for one image, and is where to start reading. The others run it for many at a time:

    pool      threads, or a worker process for each thread (`isolate`)
    slots     where the pixels go: batches in memory that the processes share
    budget    how many pixels are decoded at a time
    task      what a worker process does
    frames    frames of videos, which come one after the other from a process of their own
"""
