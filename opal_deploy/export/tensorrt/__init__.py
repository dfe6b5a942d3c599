"""TensorRT engines from verified ONNX files, with TensorRT or TensorRT for RTX.

`options` holds the build options and the choice of builder and GPU, `builder` parses and builds one network, and
`engine` writes engines with their sidecars.
"""
