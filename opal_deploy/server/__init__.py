"""The HTTP server of `opal-deploy serve`: the Open Inference Protocol, and a page for people.

`process` listens with Granian and shuts down gracefully; `app` has the routes, between `middleware` and `bodies`;
`models` has what all requests share. Nothing here imports torch or an engine at module level.
"""
