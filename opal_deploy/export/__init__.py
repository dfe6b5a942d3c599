"""From a checkpoint or an exported ONNX file to verified ONNX files and TensorRT engines.

`api` has the public functions. `plan` says what one export writes, where, and from what; `exporter.export` does the
work. A source (`checkpoint_source`, the only part that needs torch, or `onnx_source`) builds an `ExportCandidate`,
`candidate.convert_precision` lowers its precision, `verification` compares it with the reference, and `engine` builds
engines with `builder`. No file gets its final name before all files of the call have passed.
"""
