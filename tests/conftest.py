"""What every test runs under: platform, run-time type checks, compilation cache, GPU marker.

`MMTP_TEST_GPU=1` lets jax use the accelerator; otherwise every test runs on the CPU, in programs
that are compiled without optimisation unless `MMTP_TEST_OPTIMIZE=1`. Shapes and types in the
signatures of `mmtp_jax` and `pallas_kernels` are checked at run time, so both packages are imported
only after this file.
"""

from __future__ import annotations

import os
from collections.abc import Callable

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

# As in static checking (PEP 484), an int may stand where a float is annotated.
BEARTYPE = beartype.BeartypeConf(is_pep484_tower=True)


def typecheck[F: Callable[..., object]](function: F) -> F:
    """Check the calls of `function` with beartype; constructors stay unchecked.

    jax rebuilds registered dataclasses around leaves that are no arrays (None, ShapeDtypeStruct,
    shardings), and configuration classes refuse wrong values themselves, with `ConfigError`.
    """
    if function.__name__ == "__init__":
        return function
    return beartype.beartype(function, conf=BEARTYPE)


jaxtyping.install_import_hook(["mmtp_jax", "pallas_kernels"], f"{__name__}.typecheck")

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


# A worker that began one of these last would keep the others waiting for a minute or two.
LONGEST = (
    "parity/test_parity.py",
    "e2e/test_smollm2.py",
    "engine/test_exactness.py",
    "engine/test_families.py",
    "server/test_lifecycle.py",
    "bench/test_command.py",
    "server/test_stress.py",
    "train/test_commands.py",
    "train/test_fit.py",
    "notebooks/test_notebooks.py",
    "train/test_chain.py",
    "modules/test_loading.py",
    "test_llm.py",
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
