"""Running a model: one session class per engine behind the protocol of `session`. Start at `select.open_sessions`.

`onnx_session`, `cuda_session`, `torch_session` and the package `tensorrt` are the engines, `pipeline` keeps batches in
flight on a GPU for the sessions of `pipeline_session`; `verification` compares outputs with a reference; `devices`,
`nvml` and `diagnostics` say what this machine has.
"""
