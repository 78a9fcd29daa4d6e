"""What a checkpoint is, as data: layers, modules and their wiring.

A family (`mmtp_jax.families`) describes its checkpoints with these specs; the models are built from
them and no engine code branches on a family. Invalid values raise `ConfigError` naming the field
and the limit. This module imports no jax.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from mmtp_jax.checks import check_types, require


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding over the first `dim` entries of a head.

    Pairs are (i, i + dim/2), or (2i, 2i + 1) if `interleaved`. `scaling`: "linear" divides every
    frequency by `factor`; "llama3" by a divisor that depends on the frequency (Llama 3.1 model
    card); "yarn" blends between both ends (arXiv 2309.00071) and multiplies the rotated entries by
    `attention_factor`.
    """

    dim: int
    theta: float = 10000.0
    interleaved: bool = False
    scaling: Literal["linear", "llama3", "yarn"] | None = None
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True

    def __post_init__(self) -> None:
        check_types(self)
        require(
            self.dim > 0 and self.dim % 2 == 0, f"rope dim must be even and > 0, got {self.dim}"
        )
        for name in ("theta", "factor", "beta_fast", "beta_slow", "attention_factor"):
            value = getattr(self, name)
            require(value > 0, f"rope {name} must be > 0, got {value}")
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
class RelativeBias:
    """A learned bias by distance: each query head makes `rank` numbers, a table turns them into a
    bias for every distance below `extent` (Inkling)."""

    rank: int
    extent: int

    def __post_init__(self) -> None:
        check_types(self)
        _require_positive(self, "rank", "extent")


@dataclass(frozen=True)
class LogScaling:
    """Logits of far positions grow: times 1 + alpha * ln(max((position + 1) / floor, 1))."""

    floor: int
    alpha: float

    def __post_init__(self) -> None:
        check_types(self)
        _require_positive(self, "floor")


@dataclass(frozen=True)
class AttentionSpec:
    """Grouped-query attention.

    `window` counts the query itself (None: every earlier position); `scale` None is
    `head_dim ** -0.5`; `value_dim` None is `head_dim`. `sinks`: a learned logit per head that only
    joins the softmax's denominator. `head_gate`: each head's output is multiplied by a sigmoid of
    the layer's input. `value_scale` multiplies the values.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeConfig | None = None
    window: int | None = None
    value_dim: int | None = None
    scale: float | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    sinks: bool = False
    head_gate: bool = False
    value_scale: float = 1.0
    relative: RelativeBias | None = None
    log_scaling: LogScaling | None = None

    def __post_init__(self) -> None:
        check_types(self)
        _require_positive(self, "num_heads", "num_kv_heads", "head_dim", "window", "value_dim")
        require(
            self.num_heads % self.num_kv_heads == 0,
            f"num_heads ({self.num_heads}) must be a multiple of num_kv_heads"
            f" ({self.num_kv_heads})",
        )
        require(self.rope is None or self.rope.dim <= self.head_dim, "rope dim must be <= head_dim")

    @property
    def value_size(self) -> int:
        return self.head_dim if self.value_dim is None else self.value_dim

    @property
    def logit_scale(self) -> float:
        scale: float = self.head_dim**-0.5 if self.scale is None else self.scale
        return scale


@dataclass(frozen=True)
class LatentAttentionSpec:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).

    All heads read one latent of `latent_rank` numbers and one rotated key of `rope.dim` per
    position; that is what the cache holds. `query_rank` None: queries come from one projection.
    """

    num_heads: int
    latent_rank: int
    nope_dim: int
    value_dim: int
    rope: RopeConfig
    scale: float
    query_rank: int | None = None
    bias: bool = False
    window: int | None = None

    def __post_init__(self) -> None:
        check_types(self)
        names = ("num_heads", "latent_rank", "nope_dim", "value_dim", "query_rank", "window")
        _require_positive(self, *names)


@dataclass(frozen=True)
class DenseSpec:
    """A gated MLP, down(silu(gate) * up).

    `limit` clamps silu(gate) from above and up on both sides; `global_scale` is a learned scalar on
    the output.
    """

    size: int
    limit: float | None = None
    global_scale: bool = False

    def __post_init__(self) -> None:
        check_types(self)
        require(self.size > 0, f"intermediate_size must be >= 1, got {self.size}")
        require(self.limit is None or self.limit > 0, f"limit must be > 0 or None: {self.limit}")


@dataclass(frozen=True)
class MoESpec:
    """Routed experts of `size` each, with a sigmoid router (DeepSeek-V3 report, section 2.1.2).

    The `top_k` experts of highest score + `selection_bias` are taken, within the `top_groups` best
    of `num_groups` groups of experts. Their weights are the scores, divided by their sum if
    `normalize`, times `scale` (and a learned scalar if `global_scale`). `shared` is an MLP that
    every token takes with weight 1. `num_sinks` are experts that every token takes too, but whose
    scores join the normalisation (Inkling).
    """

    num_experts: int
    top_k: int
    size: int
    selection_bias: bool = True
    num_groups: int = 1
    top_groups: int = 1
    normalize: bool = True
    scale: float = 1.0
    global_scale: bool = False
    limit: float | None = None
    shared: DenseSpec | None = None
    num_sinks: int = 0

    def __post_init__(self) -> None:
        check_types(self)
        _require_positive(self, "num_experts", "top_k", "size", "num_groups", "top_groups")
        require(self.limit is None or self.limit > 0, f"limit must be > 0 or None: {self.limit}")
        require(self.num_sinks >= 0, f"num_sinks must be >= 0, got {self.num_sinks}")
        require(
            self.num_experts % self.num_groups == 0 and self.top_groups <= self.num_groups,
            f"num_groups ({self.num_groups}) must divide num_experts ({self.num_experts}) and be at"
            f" least top_groups ({self.top_groups})",
        )
        per_group = self.num_experts // self.num_groups
        require(
            self.num_groups == 1 or per_group >= 2,
            f"a group needs at least 2 experts, got {per_group}",
        )
        require(
            self.top_k <= self.top_groups * per_group,
            f"top_k ({self.top_k}) must be <= the {self.top_groups * per_group} experts of"
            " top_groups groups",
        )


@dataclass(frozen=True)
class LayerSpec:
    """One pre-norm decoder block: attention, then an MLP.

    `conv_taps` > 0 puts short causal convolutions over the keys, the values, the attention's output
    and the MLP's output (their inputs are cached by position).
    """

    attention: AttentionSpec | LatentAttentionSpec
    mlp: DenseSpec | MoESpec
    conv_taps: int = 0

    def __post_init__(self) -> None:
        check_types(self)
        require(
            self.conv_taps == 0 or self.conv_taps > 1,
            f"conv_taps must be 0 or >= 2: {self.conv_taps}",
        )
        require(
            not self.conv_taps or isinstance(self.attention, AttentionSpec),
            "conv_taps need grouped-query attention",
        )


_WIRINGS = {
    "concat": ("hidden_first", "embed_first"),
    "target_hidden": ("pre", "post"),
    "feed": ("chain_pre", "chain_post", "target"),
    "norm": ("own", "shared", "none"),
}


@dataclass(frozen=True)
class MTPConfig:
    """The modules a checkpoint ships and how they are wired (the options by which families differ).

    Module m at position q consumes token t[q+1+m] and a feed: `feed="target"` gives every module
    the target's hidden state; `chain_pre`/`chain_post` give module m > 0 the previous module's
    output before/after the norm in front of the head. `target_hidden` says whether module 0 (or
    every module) sees the target's hidden state before or after the target's final norm. `norm` is
    that of each module, one shared by all, or none. `embed_norm` applies the target's embedding
    norm to the modules' tokens too. `consumed_position`: position-dependent parts other than RoPE
    (log scaling) take the consumed token's position, q+1+m, instead of q.

    A lone module may draft several tokens: it is then applied `repeats` times, each time one
    position further on its own output (EAGLE, arXiv 2401.15077).
    """

    modules: tuple[LayerSpec, ...]
    concat: Literal["hidden_first", "embed_first"] = "hidden_first"
    target_hidden: Literal["pre", "post"] = "pre"
    feed: Literal["chain_pre", "chain_post", "target"] = "chain_post"
    norm: Literal["own", "shared", "none"] = "own"
    own_head: bool = False
    embed_norm: bool = False
    zero_first_embedding: bool = True
    consumed_position: bool = True
    repeats: int = 1

    def __post_init__(self) -> None:
        check_types(self)
        require(len(self.modules) > 0, "an MTP configuration needs at least one module")
        for name, choices in _WIRINGS.items():
            value = getattr(self, name)
            require(value in choices, f"{name} must be one of {choices}, got {value!r}")
        require(
            self.repeats == 1 or (self.repeats > 1 and len(self.modules) == 1),
            f"only a lone module is repeated, got {self.repeats} repeats of"
            f" {len(self.modules)} modules",
        )

    @property
    def num_modules(self) -> int:
        return len(self.modules)

    @property
    def num_drafts(self) -> int:
        """Tokens drafted per step."""
        return len(self.modules) * self.repeats

    def drafting(self, num_drafts: int) -> MTPConfig:
        """The same wiring for `num_drafts` drafts: the first modules, or one repeated."""
        if self.num_modules == 1:
            return replace(self, repeats=num_drafts)
        return replace(self, modules=self.modules[:num_drafts])


@dataclass(frozen=True)
class ModelConfig:
    """A target model and the MTP modules its checkpoint ships.

    `vocab_size` counts the tokens that logits cover; the embedding may have more rows
    (`embedding_size`; they are valid prompt tokens). `embed_norm`: embeddings are normalised.
    `logits_divisor` divides hidden states in front of the head (muP).
    """

    family: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    max_position: int
    norm_eps: float = 1e-5
    norm_style: Literal["plain", "one_plus"] = "plain"
    tie_embeddings: bool = False
    padded_vocab_size: int | None = None
    embed_norm: bool = False
    logits_divisor: float = 1.0
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    mtp: MTPConfig | None = None

    def __post_init__(self) -> None:
        check_types(self)
        _require_positive(self, "vocab_size", "hidden_size", "max_position")
        require(len(self.layers) > 0, "a model needs at least one layer")
        require(self.norm_eps > 0, f"norm_eps must be > 0, got {self.norm_eps}")
        require(self.logits_divisor > 0, f"logits_divisor must be > 0, got {self.logits_divisor}")
        require(
            self.embedding_size >= self.vocab_size,
            f"padded_vocab_size ({self.padded_vocab_size}) must be >= vocab_size"
            f" ({self.vocab_size})",
        )
        require(
            all(0 <= t < self.vocab_size for t in self.eos_token_ids),
            f"eos_token_ids {self.eos_token_ids} must lie in [0, {self.vocab_size})",
        )

    @property
    def embedding_size(self) -> int:
        """Rows of the embedding."""
        return self.vocab_size if self.padded_vocab_size is None else self.padded_vocab_size

    @property
    def num_modules(self) -> int:
        """MTP modules in use (after `EngineConfig` was applied: the ones that are built)."""
        return 0 if self.mtp is None else self.mtp.num_modules

    @property
    def num_drafts(self) -> int:
        """Tokens drafted per step."""
        return 0 if self.mtp is None else self.mtp.num_drafts


def _require_positive(spec: object, *names: str) -> None:
    for name in names:
        value = getattr(spec, name)
        require(value is None or value > 0, f"{name} must be >= 1, got {value}")
