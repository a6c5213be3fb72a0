"""Structured output: tokens that a grammar allows, by llguidance (the extra `guided`)."""
