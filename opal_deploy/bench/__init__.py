"""Benchmarks: measurements with their settings, conditions and machine, as JSON lines."""
