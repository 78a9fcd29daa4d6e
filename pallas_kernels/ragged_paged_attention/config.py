"""Block sizes and splits of the kernel: a heuristic, and what was measured to be better."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Config:
    """Query rows of a tile, keys at a time, the most parts that a tile's keys are cut into (each
    of `split_keys` or more), and how the kernel is compiled.

    `edges_apart` walks over blocks that all rows see whole in a loop without masks: worth its while
    where there are many. `combines_apart` adds up the parts in a second kernel, not in the part
    that is done last: the one has all multiprocessors for it, the other costs no launch.
    """

    block_m: int
    block_k: int
    splits: int
    num_warps: int
    num_stages: int
    split_keys: int = 256
    edges_apart: bool = False
    combines_apart: bool = False


def power_of_two(value: int) -> int:
    """The smallest power of two that is not below `value`."""
    return 1 << max(value - 1, 0).bit_length()


# Programs that keep an H200's 132 multiprocessors busy, three on each.
_PROGRAMS = 396
_MOST_SPLITS = 32


def config_for(
    *,
    num_tokens: int,
    num_requests: int,
    num_kv_heads: int,
    group: int,
    key_dim: int,
    itemsize: int,
    window: int | None,
    positions: int,
) -> Config:
    """Tiles as large as a request's share of the rows, blocks that fill shared memory two or three
    deep, and as many parts as occupy the device. `positions` is the longest context.
    """
    largest = 128 if key_dim <= 128 else 64 if key_dim <= 256 else 32
    block_m = min(max(power_of_two(-(-num_tokens // num_requests) * group), 16), largest)
    block_k = max(8192 // power_of_two(key_dim), 32)
    if itemsize > 2:  # twice the bytes of shared memory, and products without tensor cores
        block_m, block_k = min(block_m, 64), max(block_k // 4, 16)
    span = positions if window is None else min(positions, window + num_tokens)
    tiles = max(num_tokens * group // block_m, num_requests)
    wanted = max(_PROGRAMS // (tiles * num_kv_heads), 1)
    useful = max(span // 256, 1)
    splits = min(power_of_two(wanted + 1) // 2, power_of_two(useful), _MOST_SPLITS)
    num_warps = 8 if block_m == 128 or key_dim > 256 else 4
    return Config(block_m, block_k, splits, num_warps, num_stages=2 if key_dim > 256 else 3)
