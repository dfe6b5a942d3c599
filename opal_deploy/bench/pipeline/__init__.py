"""The pipeline of `infer`: throughput relative to the bare session, time by stage, bottleneck and memory.

`measure` times the passes, `bottleneck` judges the times, and `formatting` makes text and the measurement.
"""
