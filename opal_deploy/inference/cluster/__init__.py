"""`infer --ray`: a run whose images are predicted by actors of a Ray cluster. Ray is imported only here.

The driver is the calling process. It reads the inputs and writes the run directory, as on one machine; actors do what
lies between. In the order in which a run passes them:

    connection   connect to the cluster, and decide how many actors of which size its nodes take
    backend      the run's backend: start here
    scheduler    cut the run into chunks, assign them to actors, handle the death of actors, keep the order
    pool         the actors: one for every free place on every node, replaced when they die or nodes come back
    actor        the actor itself: one machine's executor on one GPU or some CPUs, and the model's files on its node
"""
