"""Benchmarks: measurements with their settings, conditions and machine, as JSON lines, and their comparison.

`measurement` defines the lines, `options` the commands' options. `speed`, `compare` and `pipeline` time models that
`targets` loads; `timing`, `monitor` and `machine` are their tools. `overhead` counts; `report` and `diff` read
measurements.
"""
