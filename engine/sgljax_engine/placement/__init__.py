"""Which devices an engine runs on, and which array is sharded how over them."""
