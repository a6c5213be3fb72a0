"""Parameters of a generation, and seeds of its draws. Host-only; no JAX."""

from __future__ import annotations

import dataclasses
import math
import operator
import random
import threading
from collections.abc import Iterable, Mapping
from typing import Any, Self

from sgljax_engine.errors import InvalidRequestError, unknown_name_message
from sgljax_engine.foreign_options import FOREIGN_FIELDS
from sgljax_engine.structured_outputs import OTHER_NAMES, checked_outputs, with_own_names

MAX_STOP_TOKEN_IDS = 16
"""Most stop token ids of one request, end-of-sequence ids included (an array's width)."""

MIN_SEED = -(2**63)
MAX_SEED = 2**63 - 1
_UINT64 = (1 << 64) - 1
DEFAULT_MAX_NEW_TOKENS = 128
MAX_TEMPERATURE = 1e6
MAX_PENALTY = 2.0
MIN_REPETITION_PENALTY = 0.01
"""Dividing a logit by much less would overflow float32."""

MAX_REPETITION_PENALTY = 100.0
MAX_LOGIT_BIAS = 100.0
MAX_STOP_STRINGS = 64
MAX_STOP_STRING_LEN = 1024
"""Maximum number of characters: one thread searches for the stop strings of all requests."""

MAX_TOP_LOGPROBS = 128
"""Maximum of `top_logprobs_num`, the most likely tokens to report at a position."""

MAX_TOKEN_IDS_LOGPROB = 1024

SAMPLING_MASK_SIZES = (64, 512)
"""Most tokens that a reported sampling mask holds: of a top_k up to the first, and else."""

MAX_SAMPLING_MASK = SAMPLING_MASK_SIZES[-1]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How to continue one prompt. Immutable; `dataclasses.replace` makes a changed copy.

    Logits go through, in this order: allowed_token_ids, bad_token_ids, min_new_tokens, logit_bias,
    repetition_penalty, frequency_penalty, presence_penalty, temperature, top_k, top_p, min_p. Each
    of top_k, top_p and min_p sees what the one before it kept. The order is vLLM's except for
    min_p: vLLM applies it before top_k; SGLang and this engine apply it after top_p.

    Attributes:
        n: Number of samples to draw from the prompt; each is a separate output. >= 1.
        temperature: Divides the logits; 0 means greedy. In [0, 1e6].
        top_k: Keep the k most likely tokens; -1, 0 or None keeps all. -1, None or >= 0.
        top_p: Keep the smallest set of tokens with at least this probability. In (0, 1].
        min_p: Keep tokens at least this fraction as likely as the most likely one. In [0, 1].
        presence_penalty: Subtracted from the logit of each token in the output. In [-2, 2].
        frequency_penalty: The same, times the token's occurrences in the output. In [-2, 2].
        repetition_penalty: Divides positive and multiplies negative logits of each token in prompt
            or output (Keskar et al., CTRL, 2019). In [0.01, 100]; 1 changes nothing.
        logit_bias: Added to the logits of token ids. Each in [-100, 100].
        allowed_token_ids: If not None, no other token is generated, not even a stop token.
        bad_token_ids: These tokens are never generated.
        seed: Makes the random draws of this request reproducible; None and, as in vLLM, -1 draw a
            fresh seed. Sample i of n uses a seed derived from (seed, i). In [-2**63, 2**63 - 1].
        max_new_tokens: Maximum number of tokens to generate; 0 only prefills the prompt, for its
            log-probs. None generates 128, or fewer where no more fit. >= 0.
        min_new_tokens: Until the output has this many tokens, no stop token is generated and no
            stop string is searched for. In [0, max_new_tokens].
        stop: Generation stops when the text contains one of these; the text is cut before it.
            A string, at most 64 of them, or None; each of at most 1024 characters. A stop string
            that is a special token stops at that token, though the text leaves it out.
        stop_token_ids: Generation stops after any of these; the token is kept in `output_ids`. At
            most 16, the model's end-of-sequence tokens included unless they are ignored.
        ignore_eos: Do not stop at the model's end-of-sequence tokens (`stop_token_ids` still stop).
        include_stop_str_in_output: Cut the text after the stop string, not before it.
        detokenize: False leaves the text empty and does not use the tokenizer.
        skip_special_tokens: Leave special tokens out of the text.
        spaces_between_special_tokens: Put spaces around special tokens in the text (matters only
            for slow Hugging Face tokenizers).
        decode_behind_prompt: Decode the output as it stands behind the prompt, so that the two
            texts add up. False decodes it alone, as Tunix's samplers do: then some tokenizers leave
            out a space before the first word.
        reasoning_tags: Marks before and after the reasoning. If the text begins with the first,
            strings of `stop` count only after the second. An empty first mark means that the prompt
            has it. With None they count everywhere.
        return_sampling_mask: Report which tokens each token was drawn from, so that a trainer can
            normalise over the same ones. Then a top_k of -1, 0 or None keeps 512 tokens, and one
            above 512 is refused. Tokens that are as likely as the last of a full mask (64 tokens
            for a top_k up to 64, else 512) are left out.
        structured_outputs: Generate only what a grammar allows, up to an end token; None for all. A
            dict with one of `json` (a JSON Schema), `json_object` (True), `regex`, `choice` (a list
            of texts) and `grammar` (Lark or GBNF), as in vLLM. Needs llguidance. With
            `reasoning_tags` it holds for what comes behind thoughts.
        max_thinking_tokens: Most tokens between `reasoning_tags`; then only the second tag is
            generated. >= 0; None for no bound.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int | None = -1
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    bad_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    max_new_tokens: int | None = None
    min_new_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    decode_behind_prompt: bool = True
    reasoning_tags: tuple[str, str] | None = None
    return_sampling_mask: bool = False
    structured_outputs: Mapping[str, Any] | None = None
    max_thinking_tokens: int | None = None

    def __new__(cls, **fields: Any) -> Self:
        """Refuses names that are no fields, as `from_dict` does."""
        _check_names(fields)
        return object.__new__(cls)

    def __post_init__(self) -> None:
        """Checks every field; raises InvalidRequestError naming field, value and limit."""
        # Checked values are stored as Python numbers, whatever array scalars they came as.
        for name, value in (self._numbers() | self._ids() | self._texts()).items():
            object.__setattr__(self, name, value)
        for name in _SWITCHES:
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise InvalidRequestError(f"{name} must be True or False, got {value!r}")
        if self.return_sampling_mask and (self.top_k or -1) > MAX_SAMPLING_MASK:
            raise InvalidRequestError(
                f"top_k must be at most {MAX_SAMPLING_MASK} with return_sampling_mask=True, "
                f"got {self.top_k!r}"
            )
        if self.structured_outputs is not None:
            outputs = checked_outputs(self.structured_outputs)
            object.__setattr__(self, "structured_outputs", outputs)
            if self.min_new_tokens:
                raise InvalidRequestError(
                    f"min_new_tokens={self.min_new_tokens!r} goes without structured_outputs, "
                    "whose grammar says where the output ends"
                )
        if self.max_thinking_tokens is not None and self.reasoning_tags is None:
            raise InvalidRequestError(
                f"max_thinking_tokens={self.max_thinking_tokens} needs reasoning_tags, the marks "
                "around thoughts, got None"
            )
        if self.stop and not self.detokenize:
            raise InvalidRequestError(f"stop={list(self.stop)!r} needs detokenize=True, got False")
        forbidden = set(self.bad_token_ids)
        if self.allowed_token_ids is not None and forbidden >= set(self.allowed_token_ids):
            raise InvalidRequestError(
                "allowed_token_ids must hold a token that is not in bad_token_ids, got "
                f"{list(self.allowed_token_ids)!r}"
            )

    def _numbers(self) -> dict[str, Any]:
        max_new = self.max_new_tokens
        if max_new is not None:
            max_new = _check_int("max_new_tokens", max_new, low=0)
        checked: dict[str, Any] = {
            "n": _check_int("n", self.n, low=1),
            "temperature": _check_number("temperature", self.temperature, 0.0, MAX_TEMPERATURE),
            "top_p": _check_number("top_p", self.top_p, 0.0, 1.0, low_open=True),
            "min_p": _check_number("min_p", self.min_p, 0.0, 1.0),
            "repetition_penalty": _check_number(
                "repetition_penalty",
                self.repetition_penalty,
                MIN_REPETITION_PENALTY,
                MAX_REPETITION_PENALTY,
            ),
            "max_new_tokens": max_new,
            "min_new_tokens": _check_int(
                "min_new_tokens",
                self.min_new_tokens,
                low=0,
                high=max_new,
                note="" if max_new is None else " (max_new_tokens)",
            ),
        }
        for name in ("presence_penalty", "frequency_penalty"):
            checked[name] = _check_number(name, getattr(self, name), -MAX_PENALTY, MAX_PENALTY)
        if self.top_k is not None:
            note = " (or -1, 0 or None for all)"
            is_all = type(self.top_k) is not bool and not isinstance(self.top_k, float)
            is_all = is_all and self.top_k in (-1, 0)
            checked["top_k"] = -1 if is_all else _check_int("top_k", self.top_k, low=1, note=note)
        if self.max_thinking_tokens is not None:
            most = _check_int("max_thinking_tokens", self.max_thinking_tokens, low=0)
            checked["max_thinking_tokens"] = most
        if self.seed is not None:
            checked["seed"] = _check_int("seed", self.seed, low=MIN_SEED, high=MAX_SEED)
        return checked

    def _ids(self) -> dict[str, Any]:
        checked: dict[str, Any] = {}
        for name in ("stop_token_ids", "bad_token_ids"):
            ids = getattr(self, name)
            checked[name] = _check_ids(name, () if ids is None else ids)
        if self.allowed_token_ids is not None:
            checked["allowed_token_ids"] = _check_ids("allowed_token_ids", self.allowed_token_ids)
            if not checked["allowed_token_ids"]:
                raise InvalidRequestError("allowed_token_ids must be None or hold a token, got []")
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, Mapping):
                raise InvalidRequestError(
                    f"logit_bias must map token ids to numbers, got {self.logit_bias!r}"
                )
            checked["logit_bias"] = biases = {
                _check_bias_key(key): _check_number(
                    f"logit_bias[{key!r}]", value, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS
                )
                for key, value in self.logit_bias.items()
            }
            if len(biases) < len(self.logit_bias):
                raise InvalidRequestError(
                    f"logit_bias must name each token id once, got {dict(self.logit_bias)!r}"
                )
        return checked

    def _texts(self) -> dict[str, Any]:
        given: Any = () if self.stop is None else self.stop
        stop = (given,) if isinstance(given, str) else given
        if not isinstance(stop, Iterable) or isinstance(stop, bytes):
            raise InvalidRequestError(f"stop must be a string or a list of strings, got {stop!r}")
        stop = tuple(stop)
        if len(stop) > MAX_STOP_STRINGS:
            raise InvalidRequestError(
                f"stop must hold at most {MAX_STOP_STRINGS} strings, got {len(stop)}"
            )
        for text in stop:
            if not isinstance(text, str) or not text:
                raise InvalidRequestError(f"stop must hold non-empty strings, got {text!r}")
            if len(text) > MAX_STOP_STRING_LEN:
                raise InvalidRequestError(
                    f"stop must hold strings of at most {MAX_STOP_STRING_LEN} characters, got one "
                    f"of {len(text)}"
                )
        return {"stop": stop, "reasoning_tags": self._tags()}

    def _tags(self) -> tuple[str, str] | None:
        tags: Any = self.reasoning_tags
        if tags is None:
            return None
        is_pair = isinstance(tags, (list, tuple)) and len(tags) == 2
        if not is_pair or not all(isinstance(tag, str) for tag in tags) or not tags[1]:
            raise InvalidRequestError(
                f"reasoning_tags must be None or two strings, the second not empty, got {tags!r}"
            )
        return (tags[0], tags[1])

    @property
    def changes_logits(self) -> bool:
        """True when a row needs more than temperature, top_k, top_p and min_p."""
        return (
            self.has_penalties
            or bool(self.logit_bias)
            or self.allowed_token_ids is not None
            or bool(self.bad_token_ids)
            or self.min_new_tokens > 0
        )

    @property
    def is_guided(self) -> bool:
        """Whether a grammar or a bound of thoughts decides which tokens come next."""
        return self.structured_outputs is not None or self.max_thinking_tokens is not None

    @property
    def sampling_mask_size(self) -> int:
        """Most tokens of a position's sampling mask; 0 without `return_sampling_mask`."""
        if not self.return_sampling_mask:
            return 0
        small, large = SAMPLING_MASK_SIZES
        return small if 0 < (self.top_k or 0) <= small else large

    @property
    def has_penalties(self) -> bool:
        """True when logits depend on the tokens so far."""
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0, 0, 1)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> SamplingParams:
        """Builds from a dict, for example from JSON.

        Args:
            fields: Values by name. None means the field's default. `FOREIGN_FIELDS` are accepted if
                they ask for nothing.

        Raises:
            InvalidRequestError: for an unknown key, with the nearest known one; for one of
                `FOREIGN_FIELDS` that asks for something, with what to do instead.
        """
        return cls(**_own_fields(fields))

    def override(self, given: Mapping[str, Any]) -> SamplingParams:
        """The parameters of a request whose client was promised these as defaults.

        A default is never why a request fails: it gives way to the fields that are given.

        Args:
            given: Values by name; None means the default here.

        Raises:
            InvalidRequestError: as `from_dict`.
        """
        given = _own_fields(given)
        base = dataclasses.asdict(self)
        most, least = (_as_int(given.get(name)) for name in ("max_new_tokens", "min_new_tokens"))
        if most is not None and "min_new_tokens" not in given:
            base["min_new_tokens"] = min(base["min_new_tokens"], max(most, 0))
        if least is not None and "max_new_tokens" not in given and self.max_new_tokens is not None:
            base["max_new_tokens"] = max(self.max_new_tokens, least)
        if "allowed_token_ids" in given:
            base["bad_token_ids"] = ()
        for name, other in _CONTRARY:
            neutral = SamplingParams.__dataclass_fields__[other].default
            if name in given and other not in given and base[other] != neutral:
                try:
                    SamplingParams(**{name: given[name], other: base[other]})
                except InvalidRequestError:
                    base[other] = neutral
        return SamplingParams(**base | given)

    def to_dict(self) -> dict[str, Any]:
        """All fields as a dict that `from_dict` accepts."""
        return dataclasses.asdict(self)


_CONTRARY = (
    ("return_sampling_mask", "top_k"),
    ("top_k", "return_sampling_mask"),
    ("detokenize", "stop"),
    ("stop", "detokenize"),
    ("bad_token_ids", "allowed_token_ids"),
    ("structured_outputs", "min_new_tokens"),
    ("min_new_tokens", "structured_outputs"),
)
"""Given fields, and those whose defaults may contradict them."""


def _own_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that ask for something, by the names here."""
    if not isinstance(fields, Mapping):
        raise InvalidRequestError(
            f"sampling_params must be a dict or SamplingParams, got {type(fields).__name__}"
        )
    own: dict[str, Any] = {}
    if not OTHER_NAMES.isdisjoint(fields):
        fields = with_own_names(fields)
    for name, value in fields.items():
        foreign = FOREIGN_FIELDS.get(name)
        if value is None and name in SamplingParams.__slots__:
            continue
        if foreign is None or not foreign.asks_for_nothing(value):
            own[name] = value
    return own


def _as_int(value: Any) -> int | None:
    """The number, if it is one."""
    try:
        return operator.index(value)
    except TypeError:
        return None


def _check_names(fields: Mapping[str, Any]) -> None:
    for key, value in fields.items():
        if key in FOREIGN_FIELDS:
            raise InvalidRequestError(
                f"sampling field {key}={value!r} is not supported: {FOREIGN_FIELDS[key].instead}"
            )
        if key not in SamplingParams.__slots__:
            known = SamplingParams.__slots__
            raise InvalidRequestError(unknown_name_message("sampling field", str(key), known))


_SWITCHES = (
    "ignore_eos",
    "include_stop_str_in_output",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "decode_behind_prompt",
    "return_sampling_mask",
)


@dataclasses.dataclass(frozen=True, slots=True)
class LogprobOptions:
    """Which log-probs a request reports. Log-probs other than those of its output tokens are raw.

    Attributes:
        enabled: Report log-probs.
        start_len: First prompt position to report; -1 for none. In [-1, prompt tokens).
        top_num: Most likely tokens to report at each position. In [0, 128].
        token_ids: Tokens to report at each position, likely or not. At most 1024.
    """

    enabled: bool = False
    start_len: int = -1
    top_num: int = 0
    token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Raises InvalidRequestError naming the argument of `generate`, its value and limit."""
        if not isinstance(self.enabled, bool):
            raise InvalidRequestError(f"return_logprob must be True or False, got {self.enabled!r}")
        start = _check_int("logprob_start_len", self.start_len, low=-1)
        top = _check_int("top_logprobs_num", self.top_num, low=0, high=MAX_TOP_LOGPROBS)
        ids = _check_ids("token_ids_logprob", self.token_ids)
        if len(ids) > MAX_TOKEN_IDS_LOGPROB:
            raise InvalidRequestError(
                f"token_ids_logprob must hold at most {MAX_TOKEN_IDS_LOGPROB} ids, got {len(ids)}"
            )
        for name, value in (("start_len", start), ("top_num", top), ("token_ids", ids)):
            object.__setattr__(self, name, value)
        if not self.enabled and (start, top, ids) != (-1, 0, ()):
            raise InvalidRequestError(
                f"logprob_start_len={start}, top_logprobs_num={top}, token_ids_logprob={list(ids)} "
                "need return_logprob=True, got False"
            )

    @property
    def has_extras(self) -> bool:
        """Whether each position reports more than its own token."""
        return self.top_num > 0 or bool(self.token_ids)


def _check_bias_key(key: object) -> int:
    # JSON has no integer keys.
    is_text = isinstance(key, str) and key.isdecimal() and len(key) < 20
    return _check_int("logit_bias token id", int(key) if is_text else key, low=0)  # type: ignore[arg-type]


def _check_ids(name: str, ids: Any) -> tuple[int, ...]:
    if isinstance(ids, (str, bytes)) or not isinstance(ids, Iterable):
        raise InvalidRequestError(f"{name} must be a list of integers, got {ids!r}")
    return tuple(_check_int(name, token_id, low=0) for token_id in ids)


def _check_int(
    name: str, value: object, *, low: int, high: int | None = None, note: str = ""
) -> int:
    limit = f">= {low}" if high is None else f"between {low} and {high}"
    try:
        if isinstance(value, bool):  # an int in Python, but never a count
            raise TypeError
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise InvalidRequestError(
            f"{name} must be an integer {limit}{note}, got {value!r}"
        ) from None
    if number < low or (high is not None and number > high):
        raise InvalidRequestError(f"{name} must be {limit}{note}, got {value!r}")
    return number


def _check_number(
    name: str, value: object, low: float, high: float, *, low_open: bool = False
) -> float:
    limit = f"in {'(' if low_open else '['}{low:g}, {high:g}]"
    try:
        if isinstance(value, (bool, str)):
            raise TypeError
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        raise InvalidRequestError(f"{name} must be a number {limit}, got {value!r}") from None
    below = number <= low if low_open else number < low
    if math.isnan(number) or below or number > high:
        raise InvalidRequestError(f"{name} must be {limit}, got {value!r}")
    return number


NO_LOGPROBS = LogprobOptions()


def refuse_keywords(unknown: Mapping[str, Any]) -> None:
    """Says where a sampling field goes, which other APIs take as a keyword."""
    for name, value in unknown.items():
        if name in {field.name for field in dataclasses.fields(SamplingParams)}:
            raise InvalidRequestError(
                f"generate takes no keyword {name!r}: give it as sampling_params="
                f"{{{name!r}: {value!r}}}"
            )
        raise InvalidRequestError(f"generate takes no keyword {name!r}")


class SeedSource:
    """Gives fresh seeds to requests without one. Thread-safe."""

    def __init__(self, seed: int | None) -> None:
        """Starts from a seed, or from the operating system's entropy."""
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._num_drawn = 0

    @property
    def num_drawn(self) -> int:
        """Seeds given or skipped so far."""
        return self._num_drawn

    def fresh(self) -> int:
        """A seed in [0, MAX_SEED]."""
        with self._lock:
            self._num_drawn += 1
            return self._random.randint(0, MAX_SEED)

    def skip_to(self, num_drawn: int) -> None:
        """Skips seeds until so many are drawn; nothing if they are already."""
        while self._num_drawn < num_drawn:
            self.fresh()


def derive_seed(seed: int, index: int) -> int:
    """The seed of sample `index` of a request; sample 0 keeps the request's own.

    Mixes with the finaliser of SplitMix64 (Steele, Lea and Flood, 2014).

    Args:
        seed: The request's seed, in [0, 2**63 - 1]; of a negative one, the lower 63 bits count.
        index: Index of the sample, >= 0.

    Returns:
        A seed in [0, 2**63 - 1].
    """
    if index == 0:
        return seed & MAX_SEED
    z = (seed + index * 0x9E3779B97F4A7C15) & _UINT64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _UINT64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _UINT64
    return (z ^ (z >> 31)) & MAX_SEED
