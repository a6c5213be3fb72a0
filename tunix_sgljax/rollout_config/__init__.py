"""What the fields of a RolloutConfig mean here, whichever engine it was written for."""
