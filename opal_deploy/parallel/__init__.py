"""A run whose images are predicted in chunks by several workers: processes of this machine, or actors of a cluster.

The calling process reads the inputs and writes the run directory, as in any run; workers do what lies between. In the
order in which a run passes them:

    chunk       contiguous images of a run, and their results
    scheduler   assign the chunks to workers, handle the death of workers, keep the order
    predictor   what every worker does with a chunk
    backend     the backend of a run with several processes on this machine
    pool        these processes, replaced when they die
    worker      the task of such a process

`cluster` has the actors and everything else that a cluster needs.
"""
