"""The device's memory for keys and values: planned, taken, copied."""
