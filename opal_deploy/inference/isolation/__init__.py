"""Work in processes of its own, so that a crash, a hang or a lack of memory costs one request and no other.

    pool      a number of processes, started when they are needed and replaced when they ended
    process   a worker process as its parent sees it
    worker    the main function of a worker process
    memory    memory that processes share

The work itself is a `Task`: `decoding.task` prepares images, `drawings` draws overlays and sheets.
"""
