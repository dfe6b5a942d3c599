"""Work in separate processes, so that a crash, a hang or a lack of memory costs only one request.

    pool      a number of processes, started when they are needed and replaced when they end
    process   a worker process as its parent sees it
    worker    the main function of a worker process, and memory that processes share

The work is a `Task`: `predict.decoder_pool` prepares images, `sources.video` reads frames, `run.draw_pool` draws, and
`parallel.worker` predicts chunks of a run.
"""
