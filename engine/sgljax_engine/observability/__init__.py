"""Counters, traces and progress of an engine."""
