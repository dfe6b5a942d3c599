"""The HTTP server of `opal-deploy serve`: models behind the Open Inference Protocol, and a page for people.

From the inside out:

    models     a loaded model with its service: what it takes and what it gives
    tensors    the bodies of the Open Inference Protocol: JSON with binary tensors, read and written
    inference  tensors in, tensors out, through a model's service
    explain    a picture in; its record, overlay or evidence sheet out
    page       the page for people; its style and its script lie beside it
    limits     what keeps a client from taking the server down: bytes, numbers, seconds
    metrics    counters for Prometheus
    logs       a line a request
    state      what all requests share
    middleware around every request: its id, who may ask, its log line
    app        which address is answered by what
    process    the process: listens, warms up, stops in good order
    health     the health check of a container that runs the process

Nothing here imports an engine, or torch; `process` opens what a model needs.
"""
