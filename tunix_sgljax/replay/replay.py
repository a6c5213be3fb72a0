"""Which trainings replay sampling masks, and how a learner's examples get them."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tunix.rl import rl_cluster as tunix_cluster

from sgljax_engine import InvalidConfigError, InvalidRequestError, SamplingParams
from tunix_sgljax.exactness.masked_model import masked_model
from tunix_sgljax.exactness.trainer_match import trainer_logps
from tunix_sgljax.padding import pad_masks, right_pad
from tunix_sgljax.replay.examples import Example, extended
from tunix_sgljax.rollout import SglJaxRollout
from tunix_sgljax.sampling import describe_filters, truncates

logger = logging.getLogger(__name__)

REPLAY = ("auto", "support", "off")
"""Values of a learner's `replay`."""


class Replay:
    """Sampling replay of one learner.

    The rollout reports the tokens that each token was drawn from. Current, old and reference
    log-probs are then those over these tokens: the loss's model keeps only their logits, the old
    log-probs are the rollout's, and the reference's are computed again.
    """

    def __init__(self, cluster: tunix_cluster.RLCluster, rollout: SglJaxRollout) -> None:
        """Makes the rollout report masks, and the cluster's trainer use them."""
        self._cluster, self.rollout = cluster, rollout
        rollout.report_sampling_masks()
        config = cluster.get_rollout_config(mode=tunix_cluster.Mode.TRAIN)
        self._size = rollout.sampling_params_of(config).sampling_mask_size
        trainer = cluster.actor_trainer
        policy_loss: Any = trainer.loss_fn

        def masked_loss(model: nnx.Module, train_example: Any, algo_config: Any) -> Any:
            masks = getattr(train_example, "sampling_masks", None)
            policy = model if masks is None else masked_model(model, masks)
            return policy_loss(policy, train_example, algo_config=algo_config)

        trainer.with_loss_fn(masked_loss, has_aux=True)

    @classmethod
    def choose(
        cls,
        replay: str,
        cluster: tunix_cluster.RLCluster,
        rollout: SglJaxRollout | None,
        beta: float,
        problem: str = "",
    ) -> Replay | None:
        """The replay that a learner's option asks for; None for none.

        `problem` says why the learner's own options do not go with replay.

        Raises:
            InvalidConfigError: for another value than one of `REPLAY`; for "support" where the
                trainer's log-probs could not be those over the masks.
        """
        if replay not in REPLAY:
            raise InvalidConfigError(f"replay must be one of {REPLAY}, got {replay!r}")
        if replay == "off" or (rollout is None and replay == "auto"):
            return None
        config = cluster.get_rollout_config(mode=tunix_cluster.Mode.TRAIN)
        params = None if rollout is None else rollout.sampling_params_of(config)
        problem = problem or _problem(cluster, rollout, params, beta)
        if replay == "support" and problem:
            raise InvalidConfigError(f"replay='support' {problem}")
        if params is None or (replay == "auto" and not truncates(params)):
            return None
        if problem:
            logger.warning("sampling replay is off: it %s", problem)
            return None
        assert rollout is not None
        logger.warning(
            "sampling replay is on: %s leaves out tokens, and the trainer leaves out the same "
            "ones. At most 512 tokens of a position are sampled from; replay='off' ends it",
            describe_filters(params),
        )
        return cls(cluster, rollout)

    def fields(
        self,
        example: Any,
        masks: Sequence[Sequence[np.ndarray]],
        logps: Sequence[np.ndarray] | None = None,
    ) -> dict[str, Any]:
        """What an example gets: masks, and over these the old and reference log-probs it has.

        Args:
            example: Tunix's TrainExample of some completions.
            masks: For each completion those of its tokens; empty where there is none.
            logps: The rollout's log-probs of each completion; None if the example has them.
        """
        width = example.completion_ids.shape[1]
        masks_BCN = pad_masks(masks, width, self._size)
        fields: dict[str, Any] = {"sampling_masks": masks_BCN}
        if example.old_per_token_logps is not None and logps is not None:
            fields["old_per_token_logps"] = jnp.asarray(right_pad(logps, width, 0.0))
        if example.ref_per_token_logps is not None:
            fields["ref_per_token_logps"] = self._reference_logps(example, masks_BCN)
        return fields

    def _reference_logps(self, example: Any, masks_BCN: np.ndarray) -> jax.Array:
        """The reference's log-probs [B, C] over the masks; without one, a LoRA actor's base's."""
        cluster, role = self._cluster, tunix_cluster.Role.REFERENCE
        model = _reference_of(cluster)
        if model is None:
            model, role = cluster.actor_trainer.model, tunix_cluster.Role.ACTOR
        config = cluster.get_rollout_config(mode=tunix_cluster.Mode.TRAIN)
        num_rows = len(masks_BCN)
        size = cluster.cluster_config.training_config.compute_logps_micro_batch_size or num_rows
        with cluster._get_mesh_and_logical_axis_rules_cm(role):
            cluster._maybe_load_model_from_cpu(model, role)
            graphdef, pairs, rest = nnx.split(model, nnx.LoRAParam, ...)
            if role == tunix_cluster.Role.ACTOR:
                pairs = jax.tree.map(jnp.zeros_like, pairs)
            logps_BC = trainer_logps(
                graphdef,
                nnx.merge_state(pairs, rest),
                np.asarray(example.prompt_ids),
                np.asarray(example.completion_ids),
                pad_id=self.rollout.pad_id(),
                eos_id=self.rollout.eos_id(),
                temperature=config.temperature,
                batch_size=min(size, num_rows),
                masks_BCN=masks_BCN,
            )
            cluster._maybe_offload_model_to_cpu(model, role)
        return jnp.asarray(logps_BC)


def replayed(
    replay: Replay | None, make: Callable[[], Any], kind: type[Example], mode: tunix_cluster.Mode
) -> Any:
    """An example that Tunix's learner makes with calls of the rollout; with masks in training."""
    if replay is None or mode != tunix_cluster.Mode.TRAIN:
        return make()
    with replay.rollout.recorded_outputs() as outputs:
        example = make()
    masks = [each for output in outputs for each in output.sampling_masks or ()]
    logps = [each for output in outputs for each in output.logprobs or ()]
    return extended(example, kind, **replay.fields(example, masks, logps))


def _problem(
    cluster: tunix_cluster.RLCluster,
    rollout: SglJaxRollout | None,
    params: SamplingParams | None,
    beta: float,
) -> str:
    """Why log-probs over masks cannot be had; empty if they can."""
    if rollout is None or params is None:
        return f"needs a SglJaxRollout, got {type(cluster.rollout).__name__}"
    if params.temperature == 0.0:
        return "needs a temperature above 0, got 0"
    if params.has_penalties or params.logit_bias:
        return "goes without penalties and logit_bias, which change the logits that are left"
    try:
        dataclasses.replace(params, return_sampling_mask=True)
    except InvalidRequestError as error:
        return f"goes without these filters: {error}"
    if rollout.logprobs_mode not in ("trainer_logprobs", "processed_logprobs"):
        return f"goes without logprobs_mode={rollout.logprobs_mode!r}"
    training = cluster.cluster_config.training_config
    if training.max_seq_token_per_tpu is not None:
        return (
            "goes without RLTrainingConfig.max_seq_token_per_tpu, got "
            f"{training.max_seq_token_per_tpu}: packed sequences have no masks"
        )
    has_pairs = bool(nnx.state(cluster.actor_trainer.model, nnx.LoRAParam))
    if beta != 0.0 and _reference_of(cluster) is None and not has_pairs:
        return f"needs a reference model or a LoRA actor with beta={beta}"
    return ""


def _reference_of(cluster: tunix_cluster.RLCluster) -> nnx.Module | None:
    try:
        return cluster.inference_worker.get_model("reference")
    except ValueError:
        return None
