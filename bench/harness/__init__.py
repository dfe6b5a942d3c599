"""How every benchmark measures: time, statistics, inputs, what the machine is and what it did meanwhile."""
