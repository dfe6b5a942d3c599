"""Benchmarks: measurements with their settings, conditions and machine, as JSON lines, and what is made of them.

`measurement` defines the lines. `latency`, `throughput`, `server_scenario`, `compare` and `pipeline` time models that
`targets` loads; `timing` and `batch_timing` are what they share, `monitor`, `memory` and `machine` what they record.
`decoding` and `engines` measure decode paths and precisions. `overhead` and `roofline` count, `report` and `diff` read.
"""
