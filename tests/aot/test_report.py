"""What a report has to notice, in small programs that do it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from aot.programs import needs_compiler
from jax.experimental import pallas as pl

from mmtp_jax.engine.programs import ONE_BY_ONE
from pallas_kernels._compat import compiler_params, dot
from pallas_kernels.aot import compile_for_h200, missing

PAGES = jax.ShapeDtypeStruct((2, 1000, 16, 3, 64), jnp.bfloat16)
ROWS = jax.ShapeDtypeStruct((8, 3, 64), jnp.bfloat16)
X = jax.ShapeDtypeStruct((64, 64), jnp.float32)


def chain(x: jax.Array) -> jax.Array:
    """More kernels than it takes to make a graph."""
    for _ in range(8):
        x = jnp.tanh(x @ x)
    return x


def write(pages: jax.Array, rows: jax.Array) -> jax.Array:
    return pages.at[1, 3, :8].set(rows)


@needs_compiler
def test_one_graph() -> None:
    report = compile_for_h200(chain, X)
    assert report.graphs == 1 and report.by_host == ()
    assert report.kernels and report.spilling == ()


@needs_compiler
def test_no_graph_if_kernels_are_launched_one_by_one() -> None:
    report = compile_for_h200(chain, X, options=ONE_BY_ONE)
    assert report.graphs == 0 and len(report.by_host) > 1


@needs_compiler
@pytest.mark.parametrize("kind", ["kWhile", "kConditional"])
def test_loops_and_conditionals(kind: str) -> None:
    def loop(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, x[0, 0].astype(int), lambda _, y: jnp.tanh(y @ x), x)

    def conditional(x: jax.Array) -> jax.Array:
        return jax.lax.cond(x[0, 0] > 0, chain, lambda y: y, x)

    function = {"kWhile": loop, "kConditional": conditional}[kind]
    report = compile_for_h200(lambda x: chain(function(chain(x))), X)
    assert [thunk.kind for thunk in report.branching] == [kind]
    if kind == "kWhile":  # the host asks the device whether to go on
        assert report.branching[0] in report.by_host and report.graphs > 1


@needs_compiler
def test_sorts() -> None:
    logits = jax.ShapeDtypeStruct((8, 49152), jnp.float32)
    for function in (jnp.sort, jnp.argsort, lambda x: jax.lax.top_k(x, 50)):
        assert compile_for_h200(function, logits).sorts(49152)
    for function in (jnp.argmax, jnp.sum, lambda x: jnp.sort(x[:, :16])):
        assert compile_for_h200(function, logits).sorts(49152) == []


@needs_compiler
def test_copies_of_a_cache() -> None:
    """Not donated, replaced as a whole, or read elsewhere after it was written."""
    in_place = compile_for_h200(write, PAGES, ROWS, donate=0)
    assert in_place.rewrites(PAGES) == []
    assert in_place.aliased == 2 * PAGES.size and in_place.temp < PAGES.size

    def masked(pages: jax.Array, rows: jax.Array) -> jax.Array:
        return jnp.where(rows[0, 0, 0] > 0, write(pages, rows), 0)

    assert compile_for_h200(write, PAGES, ROWS).rewrites(PAGES)
    assert compile_for_h200(write, PAGES, ROWS).aliased == 0
    assert compile_for_h200(masked, PAGES, ROWS, donate=0).rewrites(PAGES)
    turned = compile_for_h200(lambda p, r: write(p, r) + p[:, ::-1], PAGES, ROWS, donate=0)
    assert turned.rewrites(PAGES)


@needs_compiler
def test_spills() -> None:
    """A product of 128 x 256 numbers in one warp: 1024 of them in each thread."""

    def kernel(x_ref: jax.Array, y_ref: jax.Array, out_ref: jax.Array) -> None:
        out_ref[...] = dot(x_ref[...], y_ref[...])

    def product(x: jax.Array, y: jax.Array) -> jax.Array:
        return pl.pallas_call(
            kernel,
            out_shape=jax.ShapeDtypeStruct((128, 256), jnp.float32),
            compiler_params=compiler_params(num_warps=1, num_stages=1),
            name="large_product",
        )(x, y)

    shapes = (
        jax.ShapeDtypeStruct((128, 64), jnp.bfloat16),
        jax.ShapeDtypeStruct((64, 256), jnp.bfloat16),
    )
    report = compile_for_h200(product, *shapes)
    [found] = report.named("large_product")
    assert found.spilled > 0 and report.spilling == (found,)


def test_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pallas_kernels.aot._DISTRIBUTIONS", ("numpy", "no-such-compiler"))
    assert missing() == "needs no-such-compiler (the extra 'aot')"
