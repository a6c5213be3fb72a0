"""Reads the tokenizer of a model folder as its tokenizer.json describes it.

transformers 5 builds the tokenizers of some classes anew, from the vocabulary and the merges of
tokenizer.json: what else the file says is replaced by what the class would have. transformers 4
does so where a flag differs, and both add the class's special tokens to vocabularies without them.
So the whole backend is read from the file, which is also what the model's authors published.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from sgljax_engine.errors import InvalidConfigError
from sgljax_engine.processing.hf_tokenizer import HFTokenizer
from sgljax_engine.weights.hf_json import read_json

logger = logging.getLogger(__name__)

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
_NAMING_FILES = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")

_CLASSES_WITH_FLAGS = frozenset(
    f"{name}Tokenizer" for name in ("Llama", "CodeLlama", "Gemma", "Cohere", "GPTNeoX")
)
"""Classes of transformers 4 that put BOS and EOS around a text as tokenizer_config.json says."""


def load_tokenizer(folder: str | Path) -> HFTokenizer | None:
    """The Hugging Face tokenizer of a model folder; None when the folder has none."""
    if not any((Path(folder) / name).exists() for name in _TOKENIZER_FILES):
        return None
    return HFTokenizer(load_hf_tokenizer(folder))


def load_hf_tokenizer(name: str | Path) -> Any:
    """Transformers' tokenizer of a folder, with the ids and texts of its tokenizer.json.

    Without that file it is what `AutoTokenizer` makes of the folder.

    Args:
        name: A model's folder, one with the tokenizer's files only, or a name in the Hub's cache on
            this machine.

    Returns:
        A `transformers.PreTrainedTokenizerBase`.

    Raises:
        InvalidConfigError: for files that are missing or cannot be read.
    """
    path = find_tokenizer_json(name)
    loaded = _load_by_transformers(str(name), has_json=path is not None)
    if path is None or not loaded.is_fast:
        return loaded
    backend = read_backend(path)
    given = _named(path.parent)
    known = backend.get_vocab()
    added = loaded.backend_tokenizer.get_added_tokens_decoder()
    missing = [token for _, token in sorted(added.items()) if token.content not in known]
    backend.add_tokens([token for token in missing if token.content in given])
    backend.encode_special_tokens = loaded.backend_tokenizer.encode_special_tokens
    config = path.with_name("tokenizer_config.json")
    if config.exists():
        _follow_flags(backend, read_json(config), config)
    loaded._tokenizer = backend  # what `backend_tokenizer` returns, in all releases
    return loaded


def find_tokenizer_json(name: str | Path) -> Path | None:
    """The tokenizer.json of a folder, or of a model in the Hub's cache; None without one."""
    path = Path(name) / "tokenizer.json"
    if Path(name).is_dir():
        return path if path.exists() else None
    from huggingface_hub import try_to_load_from_cache

    try:
        found = try_to_load_from_cache(str(name), "tokenizer.json")
    except ValueError:  # no name of the Hub
        return None
    return Path(found) if isinstance(found, str) else None


def read_backend(path: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises this class itself
        raise InvalidConfigError(f"cannot read {path}: {error}") from error


def _follow_flags(backend: Any, config: Mapping[str, Any], path: Path) -> None:
    """Puts BOS and EOS around texts as explicit flags say, for classes that ever did so."""
    before, after = _ends(backend)
    in_file = {"add_bos_token": bool(before), "add_eos_token": bool(after)}
    given = {name: config[name] for name in in_file if isinstance(config.get(name), bool)}
    wrong = {name: flag for name, flag in given.items() if flag != in_file[name]}
    if not wrong:
        return
    around = [name for name, flag in (in_file | given).items() if flag]
    tokens = {name: _content(config.get(name.removeprefix("add_"))) for name in around}
    ids = {name: backend.token_to_id(token) for name, token in tokens.items() if token}
    cls = str(config.get("tokenizer_class")).removesuffix("Fast")
    if cls in _CLASSES_WITH_FLAGS and all(ids.get(name) is not None for name in around):
        template = [tokens.get("add_bos_token"), "$A", tokens.get("add_eos_token")]
        backend.post_processor = TemplateProcessing(
            single=[name for name in template if name],
            special_tokens=[(tokens[name], ids[name]) for name in around],
        )
        return
    logger.warning(
        "%s: %s has no effect: the post-processor of tokenizer.json decides, as in transformers 5",
        path,
        ", ".join(f"{name}={flag}" for name, flag in wrong.items()),
    )


def _ends(backend: Any) -> tuple[list[int], list[int]]:
    """The tokens that the post-processor puts before and after a text."""
    plain, whole = (backend.encode("a", add_special_tokens=flag).ids for flag in (False, True))
    start = next(
        (at for at in range(len(whole)) if whole[at : at + len(plain)] == plain), len(whole)
    )
    return whole[:start], whole[start + len(plain) :]


def _content(token: object) -> str | None:
    """The text of a token in tokenizer_config.json: a string, or an object with its attributes."""
    token = token.get("content") if isinstance(token, Mapping) else token
    return token if isinstance(token, str) else None


def _named(folder: Path) -> set[str]:
    """All texts in the files that may name more tokens than tokenizer.json has."""

    def texts(value: object) -> Iterator[str]:
        if isinstance(value, str):
            yield value
        elif isinstance(value, Mapping):
            yield from value
            value = list(value.values())
        if isinstance(value, list):
            for each in value:
                yield from texts(each)

    paths = [folder / name for name in _NAMING_FILES]
    return {text for path in paths if path.exists() for text in texts(read_json(path))}


def _load_by_transformers(name: str, *, has_json: bool) -> Any:
    with _without_advice():
        from transformers import AutoTokenizer, PreTrainedTokenizerFast  # heavy

    try:
        return AutoTokenizer.from_pretrained(name, local_files_only=True)
    except Exception as error:  # whatever transformers raises for files, or a class it has not
        if not has_json:
            raise InvalidConfigError(f"cannot read the tokenizer of {name}: {error}") from error
    try:
        # Needs no class of the model's own.
        return PreTrainedTokenizerFast.from_pretrained(name, local_files_only=True)
    except Exception as error:
        raise InvalidConfigError(f"cannot read the tokenizer of {name}: {error}") from error


@contextlib.contextmanager
def _without_advice() -> Iterator[None]:
    """Imports transformers without its note that PyTorch is missing: only tokenizers are used."""

    def is_no_advice(record: logging.LogRecord) -> bool:
        return "PyTorch was not found" not in record.getMessage()

    logger = logging.getLogger("transformers")
    logger.addFilter(is_no_advice)
    try:
        yield
    finally:
        logger.removeFilter(is_no_advice)
