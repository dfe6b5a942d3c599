"""Running a model: one session class per engine behind the protocol of `session`. Start at `select.open_sessions`.

`onnx_session`, `torch_session` and `engine_session` are the engines; on a GPU exported files and engines share
`pipeline`, which keeps batches in flight. `verification` compares outputs with a reference. `devices`, `cuda`,
`tensorrt` and `diagnostics` find out what this machine has.
"""
