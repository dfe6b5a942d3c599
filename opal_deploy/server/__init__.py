"""The HTTP server of `opal-deploy serve`: the Open Inference Protocol, and a page for people.

    options     `ServeOptions`: every option of the server
    process     `serve_models`: listens (with Granian), warms up, shuts down gracefully
    app         routes: tensors in, tensors out; an image in, its record out; `ModelApp`: within another application
    middleware  authentication, request ids, logging and counting of every request
    bodies      the bodies of requests, within limits on bytes and seconds; the protocol's JSON and binary tensors
    models      a loaded model with its service; the state that all requests share
    telemetry   the log, the file of records, and the metrics for Prometheus

Nothing here imports torch or an engine at module level.
"""
