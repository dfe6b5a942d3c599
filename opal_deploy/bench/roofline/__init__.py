"""The roofline: work counted layer by layer, and the maximum speed that a device allows."""
