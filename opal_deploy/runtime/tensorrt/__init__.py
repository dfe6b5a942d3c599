"""Engines of TensorRT and TensorRT for RTX, without torch: start at `session`.

`bindings` finds and loads the two libraries, `compatibility` says from an engine's sidecar whether it runs here,
`execution` runs batches on a loaded engine, `cuda` has the CUDA calls that it needs.
"""
