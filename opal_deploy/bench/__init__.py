"""Benchmarks: measurements with their settings, conditions and machine, as JSON lines, and their comparison.

`measurement` defines the lines, `options` the commands' options. `speed`, `compare` and `pipeline` time models that
`targets` loads, with `timing` and `monitor`; `bottleneck` judges the pipeline's times. `overhead` compares what
`counting` counts with the paper. `report` and `diff` read measurements.
"""
