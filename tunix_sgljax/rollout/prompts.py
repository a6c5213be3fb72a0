"""From a prompt of any kind to the token ids that an engine samples from: the one way there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.rl.rollout.base_rollout import RolloutConfig

from sgljax_engine import InvalidRequestError
from tunix_sgljax import padding

_SHOWN_CHARS = 60
"""Characters of a prompt that an error shows."""


class PromptEncoder:
    """Encodes prompts as Tunix's samplers do. Any thread."""

    def __init__(self, tokenizer: Any) -> None:
        is_adapter = isinstance(tokenizer, TokenizerAdapter)
        self.tokenizer = tokenizer if is_adapter else TokenizerAdapter(tokenizer)
        padding.check_pad_id(self.tokenizer.pad_id(), self.tokenizer.eos_id())

    def encode(
        self,
        prompt: Any,
        config: RolloutConfig,
        *,
        name: str,
        max_model_len: int,
        render: Callable[[Sequence[Any]], list[int]],
        is_joined: bool = False,
    ) -> list[int]:
        """Token ids of a prompt, from the first one that Tunix does not take for padding.

        A text and a conversation get BOS in front, if there is one, it is not 0, and they do not
        begin with it. Token ids stay as they are. A joined prompt must be at most
        `max_prompt_length` tokens long, since Tunix puts it into one array with those of other
        calls. InvalidRequestError calls it `name`, and has its length and the limit.
        """
        ids = self._ids(prompt, name, render)
        kept = padding.strip_prompt(ids, self.tokenizer.pad_id())
        length, num_new = len(kept), config.max_tokens_to_generate
        if not kept:
            found = f"holds the pad id {self.tokenizer.pad_id()} alone" if ids else "has no tokens"
            problem = f"{found}; it needs at least one other token"
        elif length + num_new > max_model_len:
            problem = (
                f"has {length} tokens; with max_tokens_to_generate {num_new} that is "
                f"{length + num_new}, the limit is max_model_len = {max_model_len}"
            )
        elif is_joined and length > config.max_prompt_length:
            problem = (
                f"has {length} tokens, more than "
                f"RolloutConfig.max_prompt_length={config.max_prompt_length}: Tunix joins the "
                "prompts of several rollout calls, which must be of one width. Raise it, drop the "
                "prompt, or set rollout_micro_batch_size to a multiple of "
                "compute_logps_micro_batch_size"
            )
        else:
            return kept
        raise InvalidRequestError(f"{name}={prompt!r:.{_SHOWN_CHARS}} {problem}")

    def _ids(
        self, prompt: Any, name: str, render: Callable[[Sequence[Any]], list[int]]
    ) -> list[int]:
        if isinstance(prompt, str):
            return self._with_bos([int(token) for token in self.tokenizer.encode(str(prompt))])
        if is_ids(prompt):
            return [int(token) for token in prompt]
        if isinstance(prompt, Mapping):
            prompt = [prompt]
        if is_conversation(prompt):
            return self._with_bos(render(prompt))
        raise InvalidRequestError(
            f"{name} must be a text, a list of token ids or a conversation (a list of messages), "
            f"got {prompt!r:.80}"
        )

    def _with_bos(self, ids: list[int]) -> list[int]:
        bos = self.tokenizer.bos_id()
        return self.tokenizer.dedup_bos_ids([bos, *ids] if bos is not None and bos > 0 else ids)


def is_ids(prompt: Any) -> bool:
    if isinstance(prompt, np.ndarray):
        return prompt.ndim == 1 and np.issubdtype(prompt.dtype, np.integer)
    is_list = isinstance(prompt, (list, tuple)) and len(prompt) > 0
    return is_list and all(isinstance(x, (int, np.integer)) for x in prompt)


def is_conversation(prompt: Any) -> bool:
    is_list = isinstance(prompt, (list, tuple)) and len(prompt) > 0
    return is_list and all(isinstance(x, Mapping) for x in prompt)
