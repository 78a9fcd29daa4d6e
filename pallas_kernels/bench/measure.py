"""Programs that call a kernel many times, compiled side by side and timed one after the other.

Every call of a program works on what the one before returned, so that none of them is merged with
or runs beside another. One dispatch costs about 0.1 ms: calls that move little are repeated often,
and work on enough different memory that an L2 cache does not hold all of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from pallas_kernels.bench.timing import Rates, median_seconds

THREADS = 16
_SMALL, _CACHE = 20e6, 1e8  # bytes
_FEW, _MANY, _MOST = 16, 64, 256  # calls


@dataclass(frozen=True)
class Variant:
    """An implementation: `call(number, passed, *rest)` gives what is passed on to the next call and
    a result to check; a program makes `calls` of them, numbered from 0."""

    call: Callable[..., tuple[Any, Any]]
    calls: int


@runtime_checkable
class Case(Protocol):
    """A size of a kernel's work: how much there is, the arguments, and who does it."""

    @property
    def name(self) -> str: ...

    @property
    def bytes_moved(self) -> float:
        """That a call has to read and write."""

    @property
    def flops(self) -> float: ...

    def arguments(self) -> tuple[Any, ...]:
        """What the first call is passed, and the rest."""

    def variants(self) -> dict[str, Variant]: ...

    def error(self, variant: str, arguments: tuple[Any, ...], result: Any, passed: Any) -> float:
        """Of the first call's result, and of what the last call passed on."""


@dataclass(frozen=True)
class Result:
    """Time of a call, what it moved and computed, and how that compares with a large copy and a
    large product (in percent). `error` is 0 for a result that is as it should be."""

    kernel: str
    case: str
    implementation: str
    calls: int
    us: float
    gb_per_s: float
    tflop_per_s: float
    percent_of_copy: float
    percent_of_matmul: float
    error: float


@dataclass(frozen=True)
class Failure:
    """A program that could not be compiled or run, or gave no numbers."""

    kernel: str
    case: str
    implementation: str
    reason: str


def calls_for(bytes_moved: float) -> int:
    """How many calls of a fast implementation a program makes: an even number."""
    if bytes_moved >= _SMALL:
        return _FEW
    return min(max(2 * int(_CACHE / max(bytes_moved, 1) / 2), _MANY), _MOST)


def measure(kernel: str, cases: Sequence[Case], rates: Rates) -> Iterator[Result | Failure]:
    """Every variant of every case. Nothing is timed before all programs are compiled: compiling
    beside would ruin the times."""
    compiled: list[tuple[Case, dict[str, tuple[Variant, Future[Any]]]]] = []
    with ThreadPoolExecutor(THREADS) as pool:
        for case in cases:
            shapes = jax.eval_shape(case.arguments)
            variants = case.variants().items()
            programs = {name: (one, pool.submit(_compiled, one, shapes)) for name, one in variants}
            compiled.append((case, programs))
    for case, programs in compiled:
        arguments = case.arguments()
        for name, (variant, program) in programs.items():
            try:
                yield _measured(kernel, case, name, variant, program.result(), arguments, rates)
            except jax.errors.JaxRuntimeError as error:
                yield Failure(kernel, case.name, name, str(error).splitlines()[0])


def _compiled(variant: Variant, shapes: tuple[Any, ...]) -> Any:
    def program(passed: Any, *rest: Any) -> tuple[Any, Any]:
        passed, result = variant.call(0, passed, *rest)
        for number in range(1, variant.calls):
            passed, _ = variant.call(number, passed, *rest)
        return passed, result

    return jax.jit(program, donate_argnums=0).lower(*shapes).compile()


def _measured(
    kernel: str,
    case: Case,
    name: str,
    variant: Variant,
    program: Any,
    arguments: tuple[Any, ...],
    rates: Rates,
) -> Result | Failure:
    first, *rest = arguments
    passed, result = program(jax.tree.map(jnp.copy, first), *rest)
    error = case.error(name, arguments, result, passed)
    if not math.isfinite(error):
        return Failure(kernel, case.name, name, "the result is not finite")

    def run() -> Any:
        nonlocal passed
        passed, _ = program(passed, *rest)
        return passed

    taken = median_seconds(run) / variant.calls
    bandwidth, rate = case.bytes_moved / taken, case.flops / taken
    return Result(
        kernel,
        case.name,
        name,
        variant.calls,
        round(1e6 * taken, 2),
        round(bandwidth / 1e9, 1),
        round(rate / 1e12, 2),
        round(100 * bandwidth / rates.bytes_per_second, 1),
        round(100 * rate / rates.flops_per_second, 1),
        error,
    )
