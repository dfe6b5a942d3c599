"""Models to measure: a checkpoint, an ONNX file, an engine, or a backbone with random weights, loaded in a runtime.

Start with `loading`; `networks` makes PyTorch networks and their temporary files, `torch_graph` runs them in PyTorch.
"""
