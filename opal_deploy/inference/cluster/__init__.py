"""`infer --ray`: a run whose images are predicted by actors of a Ray cluster. Ray is imported here and nowhere else.

The driver is the process that was called. It reads the inputs and writes the run directory, as on one machine; only
what lies between, from requests to records, is done by actors. In the order in which a run passes them:

    connection   connect to the cluster, and decide how many actors of which size its nodes take
    backend      the run's backend: start here
    chunks       contiguous requests, as they go to an actor; halving those that kill it
    scheduler    which chunk goes to which actor, what follows from an actor's death, and the order of the results
    pool         the actors: one for every free place on every node, replaced when they die or nodes come back
    actor        the actor itself: today's executor on one GPU, or on some CPUs
    model_files  the model's files on a node, once for all actors there
"""
