"""The roofline: work counted layer by layer, and what a device could do of it at most; start at `table`."""
