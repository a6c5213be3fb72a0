"""Progress bars, metrics and timelines of a rollout, all off by default."""
