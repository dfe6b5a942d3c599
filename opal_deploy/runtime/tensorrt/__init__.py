"""Engines of TensorRT and TensorRT for RTX, without torch: start at `session`.

`bindings` finds and loads the two libraries, `compatibility` says from an engine's sidecar whether it runs here,
`kernels` computes batches in a `runtime.pipeline`.
"""
