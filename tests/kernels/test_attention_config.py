"""Configurations: those of the table are looked up, and all of them lower for CUDA."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from pallas_kernels.ragged_paged_attention import ragged_paged_attention, triton
from pallas_kernels.ragged_paged_attention.config import (
    TUNED,
    Call,
    Config,
    Key,
    choose_config,
    config_for,
)

DEVICE = "NVIDIA H200"
PAGE, POSITIONS = 16, 2048
# (size of keys, of values, key heads, query heads for each), without own values: latent attention
HEADS = [
    (64, 64, 3, 3),
    (64, 64, 2, 8),
    (80, 80, 4, 1),
    (96, 96, 2, 5),
    (128, 128, 8, 4),
    (128, 128, 1, 7),
    (192, 128, 2, 4),
    (256, 256, 2, 4),
    (576, None, 1, 16),
]
# (rows, requests): decodes, windows of drafts, chunks among decodes, prefill
BATCHES = [(1, 1), (256, 256), (9, 1), (576, 64), (1088, 64), (8192, 1)]


def lower(
    *,
    device: str,
    dtype: str,
    key_dim: int,
    value_dim: int | None,
    num_kv_heads: int,
    group: int,
    num_tokens: int,
    num_requests: int,
) -> str:
    """The program for CUDA of a call with these sizes."""
    array = jax.ShapeDtypeStruct
    pages = (1, 1 + POSITIONS // PAGE, PAGE, num_kv_heads)
    values = None if value_dim is None else array((*pages, value_dim), dtype)
    arguments = (
        array((num_tokens, num_kv_heads * group, key_dim), dtype),
        array((*pages, key_dim), dtype),
        values,
        0,
        array((num_requests, POSITIONS // PAGE), jnp.int32),
        array((num_requests + 1,), jnp.int32),
        array((num_requests,), jnp.int32),
    )
    function = functools.partial(
        ragged_paged_attention,
        scale=0.1,
        value_dim=512 if value_dim is None else None,
        implementation="triton",
    )
    kind = AbstractDevice(device_kind=device, num_cores=None, platform="gpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), (), abstract_device=kind)):
        traced = jax.jit(function).trace(*arguments)
        return traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    """The configurations of all calls from here on; kernels are not interpreted."""
    configs: list[Config] = []
    make = triton.Task

    def task(config: Config, **rest: object) -> object:
        configs.append(config)
        return make(config=config, **rest)  # type: ignore[arg-type]

    monkeypatch.setattr(triton, "Task", task)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    return configs


@pytest.mark.parametrize("key", TUNED, ids=str)
def test_entries_of_the_table_are_used_and_lower(key: Key, chosen: list[Config]) -> None:
    text = lower(
        device=key.device,
        dtype={2: "bfloat16", 4: "float32"}[key.itemsize],
        key_dim=key.key_dim,
        value_dim=key.key_dim,
        num_kv_heads=key.num_kv_heads,
        group=key.group,
        num_tokens=key.rows * key.num_requests,
        num_requests=key.num_requests,
    )
    assert chosen == [TUNED[key]]
    assert "triton" in text


@pytest.mark.parametrize("key", TUNED, ids=str)
def test_the_table_holds_only_what_differs_from_the_heuristic(key: Key) -> None:
    for positions in (2048, 32768):
        other = config_for(
            Call(
                num_tokens=key.rows * key.num_requests,
                num_requests=key.num_requests,
                num_kv_heads=key.num_kv_heads,
                group=key.group,
                key_dim=key.key_dim,
                itemsize=key.itemsize,
                window=None,
                positions=positions,
            )
        )
        assert TUNED[key] != other


def test_another_device_gets_the_heuristic(chosen: list[Config]) -> None:
    key, tuned = next(iter(TUNED.items()))
    lower(
        device="NVIDIA A100",
        dtype="bfloat16",
        key_dim=key.key_dim,
        value_dim=key.key_dim,
        num_kv_heads=key.num_kv_heads,
        group=key.group,
        num_tokens=key.rows * key.num_requests,
        num_requests=key.num_requests,
    )
    assert chosen != [tuned]


# In float32 the smallest and largest sizes, and those without own values; others lie between.
IN_FLOAT32 = (HEADS[0], HEADS[-2], HEADS[-1])


@pytest.mark.parametrize(
    ("dtype", "heads"),
    [
        pytest.param(
            dtype,
            heads,
            id=f"{heads}-{dtype}",
            marks=pytest.mark.slow if dtype == "float32" and heads not in IN_FLOAT32 else (),
        )
        for heads in HEADS
        for dtype in ("bfloat16", "float32")
    ],
)
def test_what_is_chosen_lowers(
    heads: tuple[int, int | None, int, int], dtype: str, chosen: list[Config]
) -> None:
    """One program for each configuration that some batch gets."""
    key_dim, value_dim, num_kv_heads, group = heads
    lowered = set()
    for num_tokens, num_requests in BATCHES:
        call = Call(
            num_tokens=num_tokens,
            num_requests=num_requests,
            num_kv_heads=num_kv_heads,
            group=group,
            key_dim=key_dim,
            itemsize=jnp.dtype(dtype).itemsize,
            window=None,
            positions=POSITIONS,
        )
        config = choose_config(DEVICE, call)
        if config in lowered:
            continue
        lowered.add(config)
        text = lower(
            device=DEVICE,
            dtype=dtype,
            key_dim=key_dim,
            value_dim=value_dim,
            num_kv_heads=num_kv_heads,
            group=group,
            num_tokens=num_tokens,
            num_requests=num_requests,
        )
        assert chosen[-1] == config
        assert ("ragged_paged_attention_combine" in text) == (
            config.splits > 1 and config.combines_apart
        )
