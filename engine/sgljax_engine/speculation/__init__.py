"""Which tokens a request may be about to generate, and when it pays to verify them. Host only."""
