"""What can be timed: a checkpoint, an ONNX file, an engine, or a backbone with random weights, in a runtime."""
