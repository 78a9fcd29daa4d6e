"""Block sizes and splits of the kernel: a heuristic, and what was measured to be better."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from jax.experimental import pallas as pl


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


class Key(NamedTuple):
    """What an entry of `TUNED` holds for: a kind of device and a decode step without a window.

    Contexts are not part of it: a tile has no more parts than `split_keys` allows anyway.
    """

    device: str
    itemsize: int
    key_dim: int
    num_kv_heads: int
    group: int
    num_requests: int
    rows: int  # of a request, rounded up


# Only what was measured to be better than `config_for`; `python -m pallas_kernels.bench attention
# --tune` finds entries.
TUNED: dict[Key, Config] = {
    # SmolLM2: 21.1 instead of 22.2 us for 256 keys each
    Key("NVIDIA H200", 2, 64, 3, 3, 256, 1): Config(16, 64, 1, 4, 5),
}


@dataclass(frozen=True)
class Call:
    """What a configuration is chosen for. `positions` is the longest context, `relative` says that
    scores have a bias by distance."""

    num_tokens: int
    num_requests: int
    num_kv_heads: int
    group: int
    key_dim: int
    itemsize: int
    window: int | None
    positions: int
    relative: bool = False

    @property
    def rows(self) -> int:
        """Query rows of a request, rounded up."""
        return -(-self.num_tokens // self.num_requests)

    def key(self, device: str) -> Key:
        """The entry of `TUNED` that holds for it on a kind of device, if there is one."""
        return Key(
            device,
            self.itemsize,
            self.key_dim,
            self.num_kv_heads,
            self.group,
            self.num_requests,
            self.rows,
        )


def choose_config(device: str, call: Call) -> Config:
    """What `TUNED` has for a call on a kind of device, or else `config_for`."""
    key = call.key(device)
    if call.window is None and not call.relative and key in TUNED:
        return TUNED[key]
    return config_for(call)


# An H200's multiprocessors, and programs that they run at once.
_MULTIPROCESSORS, _PROGRAMS = 132, 264
_FEW_SPLITS, _MOST_SPLITS = 4, 32
# Of a part, where the device has enough to do.
_MANY_KEYS = 1024
# Numbers that the last program of a tile adds up at little cost: of all parts, and of each.
_FEW_NUMBERS, _LARGE_PART = 16384, 8192
# Rows of a request for which most blocks of keys are seen whole, and for which large tiles pay.
_CHUNK, _LONG_PROMPT = 256, 16384


def config_for(call: Call) -> Config:
    """Tiles as large as a request's share of the rows, and as many parts as occupy the device.

    Blocks and stages are what was best on an H200 (`python -m pallas_kernels.bench attention`). A
    load whose address is loaded, as every key's is, is only fetched (stages - 1) // 2 blocks ahead:
    5 stages are two blocks, 2 are none and leave room for larger blocks.
    """
    key_dim, positions, window = call.key_dim, call.positions, call.window
    rows = call.rows * call.group
    block_m = _rows_of_a_tile(rows, key_dim)
    tiles = max(call.num_tokens * call.group // block_m, call.num_requests)
    programs = tiles * call.num_kv_heads
    span = positions if window is None else min(positions, window + call.num_tokens)
    # Blocks are of so many keys or fewer.
    split_keys = 128 if key_dim == 128 and block_m == 16 else 256
    splits = _splits(programs, span // split_keys)
    in_chunks = rows >= _CHUNK
    if block_m == 64 and splits == 1 and not in_chunks:
        # Among windows there may be a chunk of a prompt, whose tiles have the most keys.
        split_keys = _MANY_KEYS
        splits = min(_FEW_SPLITS, pl.next_power_of_2(max(span // split_keys, 1)))
    num_warps, num_stages = 4, 5
    if call.itemsize > 2:  # twice the bytes of shared memory, and products without tensor cores
        block_m = min(block_m, 32 if key_dim <= 64 else 16)
        block_k, num_warps, num_stages = 32 if key_dim <= 64 else 16, 8, 2
    elif key_dim > 128:
        block_k, num_warps, num_stages = 32, 8, 2 if key_dim > 256 else 3
    elif key_dim <= 64 and block_m == 16 and programs <= _MULTIPROCESSORS:
        block_k, num_stages = 256, 2
    elif key_dim <= 64:
        block_k = 64 if in_chunks else 128
    elif block_m == 128:  # with 64 keys and 4 warps 1-2 % faster, though registers are spilled
        block_k, num_warps, num_stages = 128, 8, 3
    elif block_m == 16 or (block_m == 32 and splits == 1 and programs <= _PROGRAMS):
        block_k = 128
    else:
        block_k = 64
        if key_dim < 128:  # in two pieces, 64 + 16 for 80, which need more registers
            num_warps = 8
    if call.relative:  # which takes registers
        num_warps = 8
    part_size = block_m * pl.next_power_of_2(key_dim)
    return Config(
        block_m,
        block_k,
        splits,
        num_warps,
        num_stages,
        split_keys,
        edges_apart=in_chunks,
        combines_apart=splits > 1
        and (splits * part_size > _FEW_NUMBERS or part_size >= _LARGE_PART),
    )


def _rows_of_a_tile(rows: int, key_dim: int) -> int:
    """Small heads move so few bytes that more tiles help more than keys read once."""
    if key_dim <= 64 and rows <= 32:
        return 16
    if key_dim > 256:
        largest = 32
    elif key_dim == 128 and rows > _LONG_PROMPT:
        largest = 128
    else:
        largest = 64
    return min(max(pl.next_power_of_2(rows), 16), largest)


def _splits(programs: int, most: int) -> int:
    """Parts of the keys, a power of two: none where half of the device has work anyway."""
    wanted = 1 if 2 * programs > _PROGRAMS - 16 else _PROGRAMS // programs
    return min(pl.next_power_of_2(wanted + 1) // 2, pl.next_power_of_2(max(most, 1)), _MOST_SPLITS)
