"""The pipeline of `infer`: throughput relative to the bare session, time by stage, bottleneck and memory.

`measure` times a case of `cases`, `bottleneck` judges the times, `formatting` makes text and the measurement, and
`eager_baseline` runs the same model in a plain PyTorch script.
"""
