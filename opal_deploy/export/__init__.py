"""From a checkpoint, or from one of our ONNX files, to verified ONNX files and TensorRT engines.

`api.export_model` is what the command calls, and `exporter.export` the work: it takes a source
(`checkpoint_source.CheckpointSource`, the only path that needs torch, or `onnx_source.OnnxSource`), the files to write
(`options.ExportTargets`) and `options.ExportOptions`. A source builds an `ExportCandidate`,
`candidate.convert_precision` lowers its precision, `verification` compares it with the reference,
and `tensorrt.engine` builds engines. No file gets its final name before all files of the call have passed.
"""
