"""`infer --ray`: a run whose images are predicted by actors of a Ray cluster. Ray is imported only here.

The calling process reads the inputs and writes the run directory, as on one machine; actors do what lies between. They
are the workers of `parallel`, which cuts the run into chunks, assigns them and keeps their order. A process of its own,
the Ray driver, is connected to the cluster. In the order in which a run passes them:

    backend      the run's backend: start here
    process      the driver as the calling process sees it
    driver       the main function of the driver
    connection   connect to the cluster, and decide how many actors of which size its nodes take
    pool         the actors: one for every free place on every node, replaced when they die or nodes come back
    actor        the actor itself: a predictor on one GPU or some CPUs, and the model's files on its node
"""
