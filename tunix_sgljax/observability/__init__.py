"""Progress bars, metrics and timelines of a rollout. None of them, unless asked for."""
