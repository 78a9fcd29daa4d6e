"""What every test runs under: platform, run-time type checks, compilation cache, GPU marker.

`MMTP_TEST_GPU=1` lets jax use the accelerator; otherwise every test runs on the CPU, in programs
that are compiled without optimisation unless `MMTP_TEST_OPTIMIZE=1`. Shapes and types in the
signatures of `mmtp_jax` and `pallas_kernels` are checked at run time, so both packages are imported
only after this file.
"""

from __future__ import annotations

import functools
import inspect
import os
import typing
from collections.abc import Callable
from types import FunctionType, SimpleNamespace
from typing import Any, TypeAliasType

import beartype
import hypothesis
import jaxtyping
import pytest

USE_GPU = os.environ.get("MMTP_TEST_GPU") == "1"
if not USE_GPU:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    if os.environ.get("MMTP_TEST_OPTIMIZE") != "1":
        # Most of the time goes to compiling: without LLVM's optimisation it takes half as long.
        os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

# As in static checking (PEP 484), an int may stand where a float is annotated. What is raised is a
# TypeError, as if an operation had failed.
BEARTYPE = beartype.BeartypeConf(is_pep484_tower=True, violation_type=jaxtyping.TypeCheckError)


def typecheck[F: Callable[..., object]](function: F) -> F:
    """Check the calls of `function` with beartype; constructors stay unchecked.

    jax rebuilds registered dataclasses around leaves that are no arrays (None, ShapeDtypeStruct,
    shardings), and configuration classes refuse wrong values themselves, with `ConfigError`.

    This takes the place of jaxtyping's decorator, which checks arguments twice and remembers the
    sizes in every call: a fifth of the time of all tests. Only functions whose annotations have
    shapes remember sizes here.
    """
    if not isinstance(function, FunctionType) or function.__name__ == "__init__":
        return function
    if inspect.isgeneratorfunction(function):
        return JAXTYPED(function, typechecker=beartype.beartype(conf=BEARTYPE))
    hints = _hints(function)
    if all(hint is Any for hint in hints.values()):
        return function
    resolved = FunctionType(
        function.__code__,
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    functools.update_wrapper(resolved, function)
    resolved.__kwdefaults__, resolved.__annotations__ = function.__kwdefaults__, hints
    checked = beartype.beartype(resolved, conf=BEARTYPE)
    if any(map(_has_shapes, hints.values())):
        checked = JAXTYPED(checked, typechecker=None)
    return functools.update_wrapper(checked, function)


def _hints(function: FunctionType) -> dict[str, Any]:
    """The annotations of a function, evaluated; Any for one with a name that is not defined yet."""
    hints: dict[str, Any] = {}
    for name, annotation in function.__annotations__.items():
        alone = SimpleNamespace(__annotations__={name: annotation})
        try:
            hints |= typing.get_type_hints(alone, function.__globals__, include_extras=True)
        except Exception:
            hints[name] = Any
    return hints


def _has_shapes(hint: Any) -> bool:
    """Whether an annotation, or a part of it, is one of jaxtyping's."""
    if isinstance(hint, TypeAliasType):
        return _has_shapes(hint.__value__)
    if isinstance(hint, list):  # of the arguments of a Callable
        return any(map(_has_shapes, hint))
    if isinstance(hint, type) and issubclass(hint, jaxtyping.AbstractArray):
        return True
    return any(map(_has_shapes, typing.get_args(hint)))


JAXTYPED = jaxtyping.jaxtyped
jaxtyping.jaxtyped = lambda *, typechecker: typecheck  # what the import hook decorates with
jaxtyping.install_import_hook(["mmtp_jax", "pallas_kernels"], None)

hypothesis.settings.register_profile("local", deadline=None, print_blob=True)
hypothesis.settings.register_profile("ci", deadline=None, print_blob=True, derandomize=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")


def pytest_configure(config: pytest.Config) -> None:
    """Point jax at a compilation cache below pytest's own, shared by all workers of all runs.

    A size limit makes jax lock the folder; without one a worker may read a half-written entry.
    """
    cache = config.cache
    assert cache is not None
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(cache.mkdir("jax"))
    os.environ["JAX_COMPILATION_CACHE_MAX_SIZE"] = str(2 << 30)
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.2"


# Files that share the servers of a session, or engines that live as long as their process.
TOGETHER = (
    (
        "server/test_bench_serving.py",
        "server/test_chat_completions.py",
        "server/test_completions.py",
        "server/test_management.py",
        "server/test_tools.py",
    ),
    ("test_llm.py", "test_outputs.py", "test_prompt_logprobs.py"),
)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """`--dist=loadfile`, with the files of each of these groups as if they were one."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadScopeScheduling

    groups = {f"tests/{name}": files[0] for files in TOGETHER for name in files}

    class LoadFiles(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.split("::", 1)[0]
            return groups.get(file, file)

    return LoadFiles(config, log)


# A worker that began one of these last would keep the others waiting for a minute or two.
LONGEST = (
    "engine/test_families.py",
    "server/test_lifecycle.py",
    "test_llm.py",
    "engine/test_exactness.py",
    "parity/test_parity.py",
    "train/test_fit.py",
    "notebooks/test_notebooks.py",
    "server/test_completions.py",
    "engine/test_draft_lengths.py",
    "kernels/test_attention_pairs.py",
    "bench/test_command.py",
    "train/test_commands.py",
    "server/test_stress.py",
    "test_chat.py",
    "train/test_loss.py",
    "e2e/test_smollm2.py",
    "engine/test_grammar.py",
    "test_structured.py",
)


def _rank(item: pytest.Item) -> int:
    """Where a test's file stands among the longest; after them if it is none of them."""
    path = item.path.as_posix()
    ranks = [rank for rank, name in enumerate(LONGEST) if path.endswith("tests/" + name)]
    return ranks[0] if ranks else len(LONGEST)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest files; skip tests marked `gpu` unless a CUDA device is in use."""
    items.sort(key=_rank)
    marked = [item for item in items if item.get_closest_marker("gpu") is not None]
    if marked and not _has_cuda_device():
        skip = pytest.mark.skip(reason="needs a CUDA device and MMTP_TEST_GPU=1")
        for item in marked:
            item.add_marker(skip)


def _has_cuda_device() -> bool:
    if not USE_GPU:
        return False
    import jax

    return any(device.platform == "gpu" for device in jax.devices())
