"""From a `Request` to a `Prepared`: images are read, decoded, cropped and resized, ahead of the session.

`prepare` does it for one image, and is where to start reading. The others run it for many at a time:

    pool      threads, or a worker process for each thread (`isolate`)
    task      what a worker process does
    gpu       plain JPEG files in batches on GPUs, everything else through `pool`; `open_decoder_pool` chooses
"""
