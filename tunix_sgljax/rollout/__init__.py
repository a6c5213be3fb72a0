"""The rollout: `worker` is Tunix's BaseRollout, on `building` and `generating`."""

from tunix_sgljax.rollout.worker import SglJaxRollout

__all__ = ["SglJaxRollout"]
