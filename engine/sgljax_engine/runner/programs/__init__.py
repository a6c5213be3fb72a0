"""The device programs: pure functions over pytrees, compiled once per bucket."""
