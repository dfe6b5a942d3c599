"""Figures with their uncertainty: `intervals` of samples and rates, `risk` and coverage of margins. Numpy only."""
