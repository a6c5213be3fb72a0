"""The rollout that MaxText's trainer names in the place of its own for vLLM."""

from __future__ import annotations

from typing import Any

from sgljax_engine import InvalidConfigError
from tunix_sgljax.maxtext.fields import get, is_maxtext_config
from tunix_sgljax.model_config import coarser_dtype
from tunix_sgljax.rollout.worker import SglJaxRollout


class SglJaxMaxTextRollout(SglJaxRollout):
    """`SglJaxRollout` for a model that MaxText trains, from MaxText's own config.

    `ClusterConfig(rollout_engine=functools.partial(SglJaxMaxTextRollout, maxtext_config=config))`.
    """

    def __init__(self, *, maxtext_config: Any, **options: Any) -> None:
        """Checks the configuration; takes no device memory yet.

        Args:
            maxtext_config: The trainer's MaxTextConfig.
            **options: Arguments of `SglJaxRollout`. Without `dtype`, the engine computes in the
                coarser of MaxText's `dtype` and `weight_dtype`, whatever the RolloutConfig says:
                MaxText's trainer puts the latter there, in which it only stores weights.

        Raises:
            InvalidConfigError: for a config that is not MaxText's, and as in `SglJaxRollout`.
            UnsupportedModelError: names the field of MaxText's config that the engine cannot
                compute.
        """
        if not is_maxtext_config(maxtext_config):
            raise InvalidConfigError(
                f"maxtext_config must be a MaxTextConfig, got {type(maxtext_config).__name__}"
            )
        if "dtype" not in options:
            dtypes = (get(maxtext_config, name) for name in ("dtype", "weight_dtype"))
            options["dtype"] = coarser_dtype(*map(str, dtypes))
        super().__init__(model_config=maxtext_config, **options)
