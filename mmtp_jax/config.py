"""Frozen, validated configuration.

`ModelConfig` says what a checkpoint is (layers as data, so that no engine code branches on a
family); `EngineConfig` says how to run it. Invalid values raise `ConfigError` naming the field and
the limit. This module imports no jax: the scheduler and the allocator read it too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from mmtp_jax.checks import ConfigError as ConfigError
from mmtp_jax.checks import check_types
from mmtp_jax.checks import require as require


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding over the first `dim` entries of a head, half-split (NeoX) pairs.

    `scaling` is None or "llama3" (frequency-dependent divisors, Llama 3.1 model card).
    """

    dim: int
    theta: float = 10000.0
    scaling: Literal["llama3"] | None = None
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192

    def __post_init__(self) -> None:
        check_types(self)
        require(
            self.dim > 0 and self.dim % 2 == 0, f"rope dim must be even and > 0, got {self.dim}"
        )
        require(self.theta > 0, f"rope theta must be > 0, got {self.theta}")
        require(self.factor > 0, f"rope factor must be > 0, got {self.factor}")
        require(
            0 < self.low_freq_factor < self.high_freq_factor,
            f"rope low_freq_factor ({self.low_freq_factor}) must be > 0 and below high_freq_factor"
            f" ({self.high_freq_factor})",
        )
        require(
            self.original_max_position > 0,
            f"rope original_max_position must be >= 1, got {self.original_max_position}",
        )


@dataclass(frozen=True)
class LayerSpec:
    """One decoder block as data: attention, an optional short convolution, a gated MLP.

    `window` counts the query itself (None: every earlier position). `conv_taps` > 0 puts a
    depthwise causal convolution over the attention output (its inputs are cached by position).
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rope: RopeConfig | None = None
    window: int | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    conv_taps: int = 0

    def __post_init__(self) -> None:
        check_types(self)
        require(self.num_heads > 0, f"num_heads must be >= 1, got {self.num_heads}")
        require(
            self.num_kv_heads > 0 and self.num_heads % self.num_kv_heads == 0,
            f"num_heads ({self.num_heads}) must be a multiple of num_kv_heads"
            f" ({self.num_kv_heads})",
        )
        require(self.head_dim > 0, f"head_dim must be >= 1, got {self.head_dim}")
        require(
            self.intermediate_size > 0,
            f"intermediate_size must be >= 1, got {self.intermediate_size}",
        )
        require(
            self.window is None or self.window > 0, f"window must be >= 1 or None: {self.window}"
        )
        require(self.rope is None or self.rope.dim <= self.head_dim, "rope dim must be <= head_dim")
        require(
            self.conv_taps == 0 or self.conv_taps > 1,
            f"conv_taps must be 0 or >= 2: {self.conv_taps}",
        )


@dataclass(frozen=True)
class MTPConfig:
    """The modules a checkpoint ships and how they are wired (the options by which families differ).

    Module m at position q consumes token t[q+1+m] and a feed: `feed="target"` gives every module
    the target's hidden state; `chain_pre`/`chain_post` give module m > 0 the previous module's
    output before/after its own final norm. `target_hidden` says whether module 0 (or every module)
    sees the target's hidden state before or after the target's final norm.
    """

    modules: tuple[LayerSpec, ...]
    concat: Literal["hidden_first", "embed_first"] = "hidden_first"
    target_hidden: Literal["pre", "post"] = "pre"
    feed: Literal["chain_pre", "chain_post", "target"] = "chain_post"
    own_norm: bool = True
    own_head: bool = False
    zero_first_embedding: bool = True

    def __post_init__(self) -> None:
        check_types(self)
        require(len(self.modules) > 0, "an MTP configuration needs at least one module")

    @property
    def num_modules(self) -> int:
        return len(self.modules)

    def truncated(self, num_modules: int) -> MTPConfig:
        """The same wiring with only the first `num_modules` modules."""
        return replace(self, modules=self.modules[:num_modules])


@dataclass(frozen=True)
class ModelConfig:
    """A target model and the MTP modules its checkpoint ships."""

    family: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    max_position: int
    norm_eps: float = 1e-5
    norm_style: Literal["plain", "one_plus"] = "plain"
    tie_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    mtp: MTPConfig | None = None

    def __post_init__(self) -> None:
        check_types(self)
        for name in ("vocab_size", "hidden_size", "max_position"):
            require(getattr(self, name) > 0, f"{name} must be >= 1, got {getattr(self, name)}")
        require(len(self.layers) > 0, "a model needs at least one layer")
        require(self.norm_eps > 0, f"norm_eps must be > 0, got {self.norm_eps}")
        require(
            all(0 <= t < self.vocab_size for t in self.eos_token_ids),
            f"eos_token_ids {self.eos_token_ids} must lie in [0, {self.vocab_size})",
        )

    @property
    def num_modules(self) -> int:
        """MTP modules in use (after `EngineConfig` was applied: the ones that are built)."""
        return 0 if self.mtp is None else self.mtp.num_modules


@dataclass(frozen=True)
class SpeculativeConfig:
    """How to speculate. `num_speculative_tokens` None means one per module the checkpoint ships.

    `load_format="dummy"` builds `num_speculative_tokens` randomly initialised modules for a
    checkpoint that ships none (or random weights for the ones it declares).
    """

    method: Literal["mtp"] | None = "mtp"
    num_speculative_tokens: int | None = None
    load_format: Literal["auto", "dummy"] = "auto"
    modules_in_checkpoint: int = 0

    def __post_init__(self) -> None:
        check_types(self)
        require(self.method in ("mtp", None), f"method must be 'mtp' or null, got {self.method!r}")
        require(
            self.load_format in ("auto", "dummy"),
            f"load_format must be 'auto' or 'dummy', got {self.load_format!r}",
        )
        k = self.num_speculative_tokens
        require(
            k is None or 0 <= k <= 32,
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
        return available if k is None else min(available, k)

    def use_multi_module_mtp(self) -> bool:
        """True iff drafts come from more than one module (each module drafts one token)."""
        return self.method == "mtp" and self.num_modules > 1

    def resolved(self, checkpoint: MTPConfig | None) -> SpeculativeConfig:
        """This configuration for a checkpoint; `ConfigError` if it asks for more than there is."""
        available = 0 if checkpoint is None else checkpoint.num_modules
        k = self.num_speculative_tokens
        if self.method is None:
            return replace(self, num_speculative_tokens=0, modules_in_checkpoint=available)
        if self.load_format == "dummy" and available == 0:
            available = 1 if k is None else k
        if k is not None and k > available:
            raise ConfigError(
                f"num_speculative_tokens={k} exceeds the {available} MTP module(s) of this"
                " checkpoint; each module drafts one token (load_format 'dummy' gives random"
                " modules)"
            )
        return replace(
            self,
            num_speculative_tokens=available if k is None else k,
            modules_in_checkpoint=available,
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
            self.cache_bytes is None or self.cache_bytes > 0,
            f"cache_bytes must be > 0, got {self.cache_bytes}",
        )
        require(
            0.0 < self.memory_fraction <= 1.0,
            f"memory_fraction must be in (0, 1], got {self.memory_fraction}",
        )


DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class EngineConfig:
    """How to run a model. `max_model_len` None means the model's own limit.

    `row_multiple` pads ragged rows of every program to a multiple: 64 makes float32 logits on a CPU
    bit-identical whatever the batch (slower for single requests).
    """

    model: str = "smollm2-135m-instruct"
    dtype: str = "auto"
    seed: int = 0
    max_model_len: int | None = None
    max_num_seqs: int = 8
    max_num_batched_tokens: int = 512
    row_multiple: int = 1
    load_format: Literal["auto", "dummy"] = "auto"
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
            1 <= self.max_num_seqs <= 1024,
            f"max_num_seqs must be in [1, 1024], got {self.max_num_seqs}",
        )
        require(
            1 <= self.row_multiple <= 1024,
            f"row_multiple must be in [1, 1024], got {self.row_multiple}",
        )
        require(
            1 <= self.max_num_batched_tokens <= 65536,
            f"max_num_batched_tokens must be in [1, 65536], got {self.max_num_batched_tokens}",
        )
        require(
            self.load_format in ("auto", "dummy"),
            f"load_format must be 'auto' or 'dummy', got {self.load_format!r}",
        )
        require(0 <= self.seed < 2**31, f"seed must be in [0, 2**31), got {self.seed}")


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
        known = {"method", "num_speculative_tokens", "load_format"}
        for name in speculative:
            require(name in known, f"there is no speculative_config field {name!r}")
        speculative = SpeculativeConfig(**speculative)
    require(
        isinstance(speculative, SpeculativeConfig),
        f"speculative_config must be a SpeculativeConfig or a mapping, got {speculative!r}",
    )
    return EngineConfig(model=str(model), cache=cache, speculative=speculative, **options)
