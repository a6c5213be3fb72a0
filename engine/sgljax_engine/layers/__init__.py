"""Building blocks of models: pure functions over arrays."""
