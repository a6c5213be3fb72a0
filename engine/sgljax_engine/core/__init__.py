"""The engine thread: what it owns, what it is asked, and the workers beside it."""
