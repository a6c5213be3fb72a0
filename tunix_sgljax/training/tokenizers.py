"""The tokenizer of a run."""

from __future__ import annotations

from typing import Any

from tunix.generate.tokenizer_adapter import TokenizerAdapter

from sgljax_engine import InvalidConfigError
from tunix_sgljax.training.schema import TrainConfig
from tunix_sgljax.training.task import add_code_dir, import_function


def load_tokenizer(config: TrainConfig) -> TokenizerAdapter:
    """Tunix's adapter around the tokenizer.

    Raises:
        InvalidConfigError: it cannot be read.
    """
    section = config.tokenizer_config
    if section.function is not None:
        add_code_dir(config.task.code_dir)
        adapter = TokenizerAdapter(import_function("tokenizer_config.function", section.function)())
    else:
        adapter = TokenizerAdapter(
            _load_folder(section.tokenizer_path or config.actor_model_config.model_path)
        )
    if section.pad_token is not None:
        _set_pad_token(adapter, section.pad_token)
    return adapter


def _load_folder(folder: str | None) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise InvalidConfigError(
            f"tokenizer_path {folder} holds no tokenizer: {str(error).splitlines()[0]}"
        ) from None


def _set_pad_token(adapter: TokenizerAdapter, token: str) -> None:
    tokenizer = adapter.tokenizer
    if token not in tokenizer.get_vocab():
        raise InvalidConfigError(f"pad_token {token!r} is no token of the tokenizer")
    tokenizer.pad_token = token
