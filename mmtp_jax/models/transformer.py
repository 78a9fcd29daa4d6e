"""The target model: embedding, decoder layers, final norm, LM head."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int32

from mmtp_jax.cache.layout import Place
from mmtp_jax.cache.pages import Pages
from mmtp_jax.models.layer import DecoderLayer
from mmtp_jax.models.parts import Linear, RMSNorm, parameter
from mmtp_jax.models.rows import Rows
from mmtp_jax.models.visit import Visit
from mmtp_jax.specs import ModelConfig


@functools.partial(jax.jit, static_argnums=(0, 1))
def _run_layer(
    graph: nnx.GraphDef[DecoderLayer],
    place: Place,
    params: nnx.State,
    x: Float[Array, "T H"],
    rows: Rows,
    write: Bool[Array, " T"],
    depth: Int32[Array, ""],
    pages: Pages,
) -> tuple[Float[Array, "T H"], Pages]:
    """One layer. Equal layers are traced and lowered once, which is most of what a start takes when
    the compiled program is found on disk; XLA inlines the calls."""
    return nnx.merge(graph, params)(x, Visit(rows, write, place, depth), pages)


class Embedding(nnx.Module):
    """Token embedding [V, H]; also the LM head of a model with tied embeddings."""

    def __init__(self, config: ModelConfig) -> None:
        shape = (config.embedding_size, config.hidden_size)
        self.weight = parameter(shape, ("vocab", "hidden"), std=config.hidden_size**-0.5)

    def __call__(self, tokens: Int32[Array, " T"]) -> Float[Array, "T H"]:
        return self.weight[...].at[tokens].get(mode="clip")


class Transformer(nnx.Module):
    """A decoder-only target. Layers are a Python list: scanning them costs a copy of every weight
    slice on a GPU (Llama-8B shape, H200: 7.5 against 4.0 ms for 16 layers)."""

    def __init__(self, config: ModelConfig) -> None:
        hidden = config.hidden_size
        self.embed = Embedding(config)
        self.embed_norm = RMSNorm(hidden, config) if config.embed_norm else None
        self.layers = nnx.List([DecoderLayer(spec, config) for spec in config.layers])
        self.norm = RMSNorm(hidden, config)
        self.head = (
            Linear(hidden, config.embedding_size, ("hidden", "vocab"))
            if not config.tie_embeddings
            else None
        )
        self.vocab_size = config.vocab_size
        self.logits_divisor = config.logits_divisor

    def embedded(self, tokens: Int32[Array, " T"], norm: bool = True) -> Float[Array, "T H"]:
        """Embeddings as the first layer takes them, or as they are in the table."""
        x = self.embed(tokens)
        return self.embed_norm(x) if norm and self.embed_norm is not None else x

    def __call__(
        self,
        tokens: Int32[Array, " T"],
        rows: Rows,
        write: Bool[Array, " T"],
        pages: Pages,
        places: tuple[Place, ...],
    ) -> tuple[Float[Array, "T H"], Pages]:
        """Hidden states *before* the final norm, and the pages with this pass's entries."""
        x = self.embedded(tokens)
        for index, (layer, place) in enumerate(zip(self.layers, places, strict=True)):
            graph, params = nnx.split(layer)
            base, depth = place.relative()
            with jax.named_scope(f"layer_{index}"):
                x, pages = _run_layer(graph, base, params, x, rows, write, jnp.int32(depth), pages)
        return x, pages

    def logits(
        self, hidden: Float[Array, "S H"], dtype: DTypeLike = jnp.float32
    ) -> Float[Array, "S V"]:
        """Logits of hidden states that already went through a final norm."""
        if self.logits_divisor != 1.0:
            hidden = hidden / jnp.asarray(self.logits_divisor, hidden.dtype)
        if self.head is not None:
            logits = self.head(hidden).astype(dtype)
        else:
            logits = jnp.einsum(
                "sh,vh->sv", hidden, self.embed.weight[...], preferred_element_type=dtype
            )
        return logits[:, : self.vocab_size]
