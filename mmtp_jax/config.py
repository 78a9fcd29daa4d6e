"""How to run a model: frozen, validated configuration (`specs.py` says what a model is).

Invalid values raise `ConfigError` naming the field and the limit. This module imports no jax: the
scheduler and the allocator read it too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, NamedTuple

from mmtp_jax.checks import ConfigError as ConfigError
from mmtp_jax.checks import check_types
from mmtp_jax.checks import require as require
from mmtp_jax.specs import MTPConfig


@dataclass(frozen=True)
class SpeculativeConfig:
    """How to speculate. `num_speculative_tokens` None means one per module the checkpoint ships;
    "auto" lets every step choose how many, up to what None means (`adaptive` once it is resolved).

    Each module drafts one token; a checkpoint's only module may draft several (it is re-used on its
    own output). `model` names a folder of modules that were trained for the target and are stored
    apart (`mmtp_jax.modules`): they take the place of those that the checkpoint ships, and None
    then means the number that they recommend. `load_format="dummy"` builds `num_speculative_tokens`
    randomly initialised modules for a checkpoint that ships none (or random weights for the ones it
    declares).
    """

    method: Literal["mtp"] | None = "mtp"
    num_speculative_tokens: int | Literal["auto"] | None = None
    load_format: Literal["auto", "dummy"] = "auto"
    model: str | None = None
    modules_in_checkpoint: int = 0
    adaptive: bool = False

    def __post_init__(self) -> None:
        check_types(self)
        require(self.method in ("mtp", None), f"method must be 'mtp' or null, got {self.method!r}")
        require(
            self.load_format in ("auto", "dummy"),
            f"load_format must be 'auto' or 'dummy', got {self.load_format!r}",
        )
        require(
            self.model is None or self.load_format == "auto",
            f"load_format 'dummy' makes random modules, so it cannot go with those of {self.model}",
        )
        k = self.num_speculative_tokens
        require(
            not isinstance(k, int) or 0 <= k <= 32,
            f"num_speculative_tokens must be in [0, 32], got {k}",
        )
        require(self.modules_in_checkpoint >= 0, "modules_in_checkpoint must be >= 0")

    @property
    def num_modules(self) -> int:
        """The modules that are built and loaded: min(modules in the checkpoint, tokens asked
        for).
        """
        if self.method is None:
            return 0
        k = self.num_speculative_tokens
        available = self.modules_in_checkpoint
        return min(available, k) if isinstance(k, int) else available

    @property
    def num_drafts(self) -> int:
        """Tokens drafted per step, once resolved for a checkpoint."""
        k = self.num_speculative_tokens
        return k if self.num_modules and isinstance(k, int) else self.num_modules

    def use_multi_module_mtp(self) -> bool:
        """True iff drafts come from more than one module (each module drafts one token)."""
        return self.method == "mtp" and self.num_modules > 1

    def resolved(
        self, checkpoint: MTPConfig | None, recommended: int | None = None
    ) -> SpeculativeConfig:
        """This configuration for a checkpoint (and the number of drafts that its modules recommend,
        if any); `ConfigError` if it asks for more than there is."""
        available = 0 if checkpoint is None else checkpoint.num_modules
        adaptive = self.num_speculative_tokens == "auto"
        k = self.num_speculative_tokens if isinstance(self.num_speculative_tokens, int) else None
        if self.method is None:
            return replace(self, num_speculative_tokens=0, modules_in_checkpoint=available)
        if self.load_format == "dummy" and available == 0:
            available = 1 if k is None else k
        if k is not None and k > available and available != 1:
            raise ConfigError(
                f"num_speculative_tokens={k} exceeds the {available} MTP module(s) of this"
                " checkpoint; each module drafts one token (load_format 'dummy' gives random"
                " modules)"
            )
        if k is None:
            k = available if recommended is None else recommended
        return replace(
            self,
            num_speculative_tokens=k,
            modules_in_checkpoint=available,
            adaptive=adaptive and k > 0,
        )


@dataclass(frozen=True)
class CacheConfig:
    """Paged cache sizes. Give `num_pages` (per group), or `cache_bytes`, or neither (then
    `memory_fraction` of the accelerator's free memory, or 1 GiB on a CPU)."""

    page_size: int = 16
    num_pages: int | None = None
    cache_bytes: int | None = None
    memory_fraction: float = 0.85
    enable_prefix_caching: bool = True

    def __post_init__(self) -> None:
        check_types(self)
        require(1 <= self.page_size <= 256, f"page_size must be in [1, 256], got {self.page_size}")
        require(
            self.num_pages is None or self.num_pages >= 2,
            f"num_pages must be >= 2 (page 0 is the null page), got {self.num_pages}",
        )
        require(
            (self.num_pages or 0) * self.page_size < 2**31,
            "num_pages * page_size must be < 2**31 (positions are 32-bit integers),"
            f" got {self.num_pages} * {self.page_size}",
        )
        require(
            self.cache_bytes is None or self.cache_bytes > 0,
            f"cache_bytes must be > 0, got {self.cache_bytes}",
        )
        require(
            0.0 < self.memory_fraction <= 1.0,
            f"memory_fraction must be in (0, 1], got {self.memory_fraction}",
        )


class Limits(NamedTuple):
    """Requests that run at once, and rows of one step."""

    max_num_seqs: int
    max_num_batched_tokens: int


# What a configuration that says nothing gets, on a CPU and elsewhere: there, rows cost little.
SMALL = Limits(8, 512)
LARGE = Limits(256, 4096)

DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class EngineConfig:
    """How to run a model. `max_model_len` None means the model's own limit; `max_num_seqs` and
    `max_num_batched_tokens` None those of `SMALL` on a CPU, of `LARGE` elsewhere.

    `row_multiple` pads ragged rows of every program to a multiple: 64 makes float32 logits on a CPU
    bit-identical whatever the batch (slower for single requests). `hf_overrides` replaces keys of
    the checkpoint's config.json (nested objects key by key). `tensor_parallel_size` devices share
    heads, experts and vocabulary. `enforce_eager` (vLLM's name) launches the kernels of a step one
    by one, not as a CUDA graph: slower, but a trace then says which part of the step each is of.
    """

    model: str = "smollm2-135m-instruct"
    dtype: str = "auto"
    seed: int = 0
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    row_multiple: int = 1
    load_format: Literal["auto", "dummy"] = "auto"
    hf_overrides: dict[str, Any] = field(default_factory=dict)
    tensor_parallel_size: int = 1
    enforce_eager: bool = False
    cache: CacheConfig = field(default_factory=CacheConfig)
    speculative: SpeculativeConfig = field(default_factory=SpeculativeConfig)

    def __post_init__(self) -> None:
        check_types(self)
        require(self.dtype in DTYPES, f"dtype must be one of {', '.join(DTYPES)}: {self.dtype!r}")
        require(
            self.max_model_len is None or self.max_model_len >= 2,
            f"max_model_len must be >= 2, got {self.max_model_len}",
        )
        require(
            self.max_num_seqs is None or 1 <= self.max_num_seqs <= 1024,
            f"max_num_seqs must be in [1, 1024], got {self.max_num_seqs}",
        )
        require(
            1 <= self.row_multiple <= 1024,
            f"row_multiple must be in [1, 1024], got {self.row_multiple}",
        )
        require(
            self.max_num_batched_tokens is None or 1 <= self.max_num_batched_tokens <= 65536,
            f"max_num_batched_tokens must be in [1, 65536], got {self.max_num_batched_tokens}",
        )
        require(
            self.load_format in ("auto", "dummy"),
            f"load_format must be 'auto' or 'dummy', got {self.load_format!r}",
        )
        require(
            1 <= self.tensor_parallel_size <= 64,
            f"tensor_parallel_size must be in [1, 64], got {self.tensor_parallel_size}",
        )
        require(0 <= self.seed < 2**31, f"seed must be in [0, 2**31), got {self.seed}")
        require(
            self.speculative.model is None or self.load_format == "auto",
            "load_format 'dummy' makes a random target, for which no modules were trained: it"
            f" cannot go with those of {self.speculative.model}",
        )

    @property
    def limits(self) -> Limits:
        """The limits of a step."""
        return self.within(SMALL)

    def within(self, default: Limits) -> Limits:
        """The limits of a step where those that are not given are the default's."""
        given = (self.max_num_seqs, self.max_num_batched_tokens)
        return Limits(*(d if own is None else own for own, d in zip(given, default, strict=True)))


def engine_config(
    model: str, speculative: SpeculativeConfig | Mapping[str, Any] | None, /, **options: Any
) -> EngineConfig:
    """An `EngineConfig` from keywords; `ConfigError` names an option that does not exist."""
    cache_fields = {field.name for field in fields(CacheConfig)}
    engine_fields = {field.name for field in fields(EngineConfig)}
    engine_fields -= {"model", "cache", "speculative"}
    for name in options:
        require(name in cache_fields | engine_fields, f"there is no engine option {name!r}")
    cache = CacheConfig(**{name: options.pop(name) for name in cache_fields & options.keys()})
    if speculative is None:
        speculative = SpeculativeConfig()
    elif isinstance(speculative, Mapping):
        known = {"method", "num_speculative_tokens", "load_format", "model"}
        for name in speculative:
            require(name in known, f"there is no speculative_config field {name!r}")
        speculative = SpeculativeConfig(**speculative)
    require(
        isinstance(speculative, SpeculativeConfig),
        f"speculative_config must be a SpeculativeConfig or a mapping, got {speculative!r}",
    )
    return EngineConfig(model=str(model), cache=cache, speculative=speculative, **options)
