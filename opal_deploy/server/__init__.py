"""The HTTP server of `opal-deploy serve`: the Open Inference Protocol, and a page for people.

    options     `ServeOptions`: every option of the server
    models      a loaded model with its service; the state that all requests share
    tensors     request and response bodies of the protocol: JSON with binary tensors
    inference   tensors in, tensors out; for the page, an image in, its record, overlay or evidence sheet out
    admission   limits on bytes, concurrent requests and seconds
    telemetry   the log, the file of records, and the metrics for Prometheus
    middleware  authentication, request ids, logging and counting of every request
    app         routes and their handlers
    openapi     the OpenAPI document behind /docs
    process     `serve_models`: listens (with Granian), warms up, shuts down gracefully
    mounted     `ModelApp`: a model's addresses within another ASGI application
    health      the health check of a container

Nothing here imports torch or an engine at module level.
"""
