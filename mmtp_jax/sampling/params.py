"""What a request asks of the sampler: validated, immutable, free of jax.

Names, defaults and meanings follow vLLM's `SamplingParams`. Every invalid value raises
`ConfigError` with the field and its limit, so that nothing past this point has to check again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Any, cast

from mmtp_jax.config import require
from mmtp_jax.sampling.structured import StructuredOutputs

GREEDY_BELOW = 1e-5
MAX_STOP_IDS = 16
MAX_LOGPROBS = 20
INT32_MAX = 2**31 - 1


@dataclass(frozen=True)
class SamplingParams:
    """How to choose the tokens of one request.

    n: independent samples of the prompt. temperature: below 1e-5 is greedy. top_k: keep the k best
    tokens (0 or -1: all). top_p: keep the smallest set of best tokens with this probability. min_p:
    keep tokens at least this likely relative to the best one. seed: None lets the engine choose.
    max_tokens: None means until the model's limit. min_tokens: stop ids are banned until then.
    stop, stop_token_ids: end the text (at most 16 ids, those of the model included). logprobs: how
    many alternatives to report per token. presence_penalty and frequency_penalty count the output
    only, repetition_penalty the prompt too. logit_bias: token id to an offset of its logit.
    allowed_token_ids, banned_token_ids: restrict the vocabulary. prompt_logprobs: how many
    alternatives to report per prompt token. structured_outputs: what the text must match (a
    `StructuredOutputs` or a mapping with its fields); it ends the text, so it excludes what could
    leave no token to choose: ignore_eos, min_tokens, allowed_token_ids and banned_token_ids.

    Sequences are stored as tuples (`stop` too, None as an empty one) and `logit_bias` as a dict.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    banned_token_ids: Sequence[int] = ()
    skip_special_tokens: bool = True
    prompt_logprobs: int | None = None
    structured_outputs: StructuredOutputs | Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            value = getattr(self, name)
            require(isinstance(value, bool), f"{name} must be true or false, got {value!r}")
        self._check_lengths()
        self._check_distribution()
        self._normalise_stop()
        self._normalise_tokens()
        self._normalise_structure()

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _set_int(self, name: str, low: int, high: int) -> None:
        self._set(name, _int_in(name, getattr(self, name), low, high))

    def _set_float(self, name: str, low: float, high: float) -> None:
        self._set(name, _float_in(name, getattr(self, name), low, high))

    def _check_lengths(self) -> None:
        self._set_int("n", 1, 128)
        if self.seed is not None:
            self._set_int("seed", -(2**63), 2**64 - 1)
        if self.max_tokens is not None:
            self._set_int("max_tokens", 1, INT32_MAX)
        self._set_int("min_tokens", 0, INT32_MAX)
        require(
            self.max_tokens is None or self.min_tokens <= self.max_tokens,
            f"min_tokens must be <= max_tokens ({self.max_tokens}), got {self.min_tokens}",
        )
        if self.logprobs is not None:
            self._set_int("logprobs", 0, MAX_LOGPROBS)
        if self.prompt_logprobs is not None:
            self._set_int("prompt_logprobs", 0, MAX_LOGPROBS)

    def _check_distribution(self) -> None:
        # The outer bounds of temperature and repetition keep their float32 forms finite and > 0.
        self._set_float("temperature", 0.0, 1e6)
        self._set_int("top_k", -1, INT32_MAX)
        self._set_float("top_p", 0.0, 1.0)
        require(self.top_p > 0.0, f"top_p must be in (0, 1], got {self.top_p}")
        self._set_float("min_p", 0.0, 1.0)
        self._set_float("presence_penalty", -2.0, 2.0)
        self._set_float("frequency_penalty", -2.0, 2.0)
        self._set_float("repetition_penalty", 1e-6, 1e6)

    def _normalise_stop(self) -> None:
        require(
            self.stop is None or isinstance(self.stop, (str, Sequence)),
            f"stop must be a string or a list of strings, got {self.stop!r}",
        )
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        require(
            all(isinstance(text, str) and text for text in stop),
            f"stop must hold non-empty strings, got {self.stop!r}",
        )
        self._set("stop", stop)

    def _normalise_tokens(self) -> None:
        self._set("stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        require(
            len(self.stop_token_ids) <= MAX_STOP_IDS,
            f"stop_token_ids must hold at most {MAX_STOP_IDS} ids, got {len(self.stop_token_ids)}",
        )
        self._set("banned_token_ids", _token_ids("banned_token_ids", self.banned_token_ids))
        if self.allowed_token_ids is not None:
            self._set("allowed_token_ids", _token_ids("allowed_token_ids", self.allowed_token_ids))
            require(len(self.allowed_token_ids) > 0, "allowed_token_ids must hold at least one id")
        if self.logit_bias is not None:
            require(
                isinstance(self.logit_bias, Mapping),
                f"logit_bias must map token ids to numbers, got {self.logit_bias!r}",
            )
            bias = {
                _int_in("logit_bias token id", token, 0, INT32_MAX): _float_in(
                    f"logit_bias[{token}]", value, -100.0, 100.0
                )
                for token, value in self.logit_bias.items()
            }
            self._set("logit_bias", bias)

    def _normalise_structure(self) -> None:
        given = self.structured_outputs
        if given is None:
            return
        if isinstance(given, Mapping):
            known = {entry.name for entry in fields(StructuredOutputs)}
            for name in given:
                require(name in known, f"there is no structured_outputs field {name!r}")
            self._set("structured_outputs", StructuredOutputs(**given))
        require(
            isinstance(self.structured_outputs, StructuredOutputs),
            f"structured_outputs must be a StructuredOutputs or a mapping, got {given!r}",
        )
        for name in ("ignore_eos", "min_tokens", "allowed_token_ids", "banned_token_ids"):
            require(
                not getattr(self, name),
                f"{name} cannot be combined with structured_outputs: it could leave no token",
            )

    @property
    def greedy(self) -> bool:
        """True iff the most likely token is always taken."""
        return self.temperature < GREEDY_BELOW

    def stop_ids(self, eos_token_ids: Iterable[int]) -> tuple[int, ...]:
        """The ids that end a text: `stop_token_ids` and, without `ignore_eos`, the model's own.

        Raises `ConfigError` for more than MAX_STOP_IDS of them.
        """
        model_ids = () if self.ignore_eos else tuple(eos_token_ids)
        ids = tuple(dict.fromkeys((*self.stop_token_ids, *model_ids)))
        require(
            len(ids) <= MAX_STOP_IDS,
            f"stop_token_ids must hold at most {MAX_STOP_IDS} ids with the model's own"
            f" {len(model_ids)}, got {len(ids)}",
        )
        return ids

    def validate_for(self, vocab_size: int, eos_token_ids: Iterable[int] = ()) -> None:
        """Raise `ConfigError` where these parameters do not fit a model.

        Token ids must lie in the vocabulary, and at least one token must be left to choose, also
        while `min_tokens` bans the stop ids.
        """
        for name in ("stop_token_ids", "allowed_token_ids", "banned_token_ids", "logit_bias"):
            for token in getattr(self, name) or ():
                require(token < vocab_size, f"{name} must be in [0, {vocab_size - 1}], got {token}")
        stop_ids = self.stop_ids(eos_token_ids)
        banned = set(self.banned_token_ids)
        _require_choice(self.allowed_token_ids, banned, vocab_size, "banned_token_ids")
        if self.min_tokens > 0:
            banned |= set(stop_ids)
            _require_choice(self.allowed_token_ids, banned, vocab_size, "min_tokens")


def default_seed(engine_seed: int, number: int) -> int:
    """The seed of the engine's prompt `number`, if it asks for none of its own."""
    return engine_seed * 1_000_003 + number


def sample_seed(seed: int, index: int) -> int:
    """The seed of sample `index` of a prompt, in [0, 2**32): samples are independent of each other
    because their noise is keyed by different seeds."""
    return (seed + index * 0x9E3779B1) % 2**32


def _require_choice(
    allowed: Sequence[int] | None, banned: set[int], vocab_size: int, name: str
) -> None:
    left = vocab_size - len(banned) if allowed is None else len(set(allowed) - banned)
    require(left > 0, f"{name} must leave at least one token to choose, got none")


def _int_in(name: str, value: object, low: int, high: int) -> int:
    if type(value) is int and low <= value <= high:
        return value  # mostly: the rest is for numbers of other types, and for the message
    number = cast(int, value)
    valid = not isinstance(value, bool) and isinstance(value, Integral) and low <= number <= high
    require(bool(valid), f"{name} must be an integer in [{low}, {high}], got {value!r}")
    return int(number)


def _float_in(name: str, value: object, low: float, high: float) -> float:
    if type(value) is float and low <= value <= high:
        return value
    number = cast(float, value)
    valid = not isinstance(value, bool) and isinstance(value, Real) and low <= number <= high
    require(bool(valid), f"{name} must be a number in [{low:g}, {high:g}], got {value!r}")
    return float(number)


def _token_ids(name: str, values: object) -> tuple[int, ...]:
    require(
        isinstance(values, Iterable) and not isinstance(values, (str, bytes, Mapping)),
        f"{name} must be a list of token ids, got {values!r}",
    )
    assert isinstance(values, Iterable)
    return tuple(_int_in(name, value, 0, INT32_MAX) for value in values)
