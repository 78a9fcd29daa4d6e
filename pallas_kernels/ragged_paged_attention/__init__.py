"""Ragged paged attention: decode windows, prefill chunks and mixtures of both in one call."""

from pallas_kernels.ragged_paged_attention.api import ragged_paged_attention

__all__ = ["ragged_paged_attention"]
