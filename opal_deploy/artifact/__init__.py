"""The files that models are kept in: reading, writing and checking them, without torch and without running anything.

Start at `metadata.Metadata`, the JSON document that every ONNX file (`onnx_file`) and every engine's sidecar
(`engine_file`) carries. `checkpoint_index` reads checkpoints without torch, `outputs` and `test_vectors` hold what a
model returns, `measurements` what was measured of it, and `files` writes files whole or not at all.
"""
