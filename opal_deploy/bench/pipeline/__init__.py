"""The pipeline of `infer`: its throughput against the bare session, its time by stage, its bottleneck and its memory.

Start with `measure`; `cases` says what is varied, `bottleneck` judges the times, `formatting` makes text and the
measurement, `eager_baseline` runs the same model as a plain PyTorch script.
"""
