"""Compiled programs on disk: loaded where everything is as it was, built where it is not."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine.harness import Harness
from engine.models import plain
from engine.suite import limited, prompt

from mmtp_jax.engine import kept, programs
from mmtp_jax.engine.kept import KeptPrograms

ARGUMENTS = (jax.ShapeDtypeStruct((3,), np.dtype(np.float32)), np.int32(0))


def twice(values: jax.Array, offset: jax.Array) -> dict[str, jax.Array]:
    return {"sum": 2 * values + offset}


def build() -> jax.stages.Compiled:
    return jax.jit(twice, donate_argnums=0).lower(*ARGUMENTS).compile()


def never() -> jax.stages.Compiled:
    raise AssertionError("built although it was kept")


def store(directory: Path | None, facts: object = "model") -> KeptPrograms:
    return KeptPrograms(directory, jax.devices()[0], facts)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """With one program in it, "twice"."""
    store(tmp_path / "engine").get("twice", ARGUMENTS, build)
    return tmp_path / "engine"


def test_a_program_is_loaded(directory: Path) -> None:
    program = store(directory).get("twice", ARGUMENTS, never)
    values = jnp.arange(3, dtype=jnp.float32)
    assert program(values, np.int32(1))["sum"].tolist() == [1, 3, 5]
    assert values.is_deleted()  # given away, as when it was compiled
    with pytest.raises(TypeError):
        program(jnp.zeros(4, jnp.float32), np.int32(1))


@pytest.mark.parametrize(
    ("facts", "name", "arguments"),
    [
        ("another model", "twice", ARGUMENTS),
        ("model", "thrice", ARGUMENTS),
        ("model", "twice", (jax.ShapeDtypeStruct((4,), np.dtype(np.float32)), np.int32(0))),
        ("model", "twice", (jax.ShapeDtypeStruct((3,), np.dtype(np.float16)), np.int32(0))),
        ("model", "twice", ([ARGUMENTS[0]], np.int32(0))),
    ],
    ids=["facts", "name", "shape", "dtype", "structure"],
)
def test_another_program_is_built(
    directory: Path, facts: str, name: str, arguments: tuple[Any, ...]
) -> None:
    with pytest.raises(AssertionError, match="built"):
        store(directory, facts).get(name, arguments, never)


@pytest.mark.parametrize("change", ["source", "environment", "settings"])
def test_what_it_was_compiled_under_is_part_of_a_program(
    directory: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    if change == "source":
        monkeypatch.setattr(kept, "source_digest", lambda: "edited")
    elif change == "environment":
        monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
    else:
        other = {**jax.config.values, "jax_default_matmul_precision": "float32"}
        monkeypatch.setattr(type(jax.config), "values", property(lambda _: other))
    with pytest.raises(AssertionError, match="built"):
        store(directory).get("twice", ARGUMENTS, never)


def test_the_digest_is_of_every_source_file(tmp_path: Path) -> None:
    digests = []
    for name, text in (("a.py", "1"), ("a.py", "2"), ("deep/b.py", "2")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
        digests.append(kept.source_digest.__wrapped__((tmp_path,)))
    assert len(set(digests)) == 3
    assert Path(kept.__file__).is_relative_to(kept._SOURCE[0])


def test_what_cannot_be_read_is_built_and_replaced(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (file,) = directory.iterdir()
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with caplog.at_level(logging.WARNING):
        store(directory).get("twice", ARGUMENTS, build)
    assert "cannot load the compiled program" in caplog.text
    store(directory).get("twice", ARGUMENTS, never)
    assert list(directory.iterdir()) == [file]


def test_what_cannot_be_written_is_built(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "engine").touch()
    with caplog.at_level(logging.WARNING):
        program = store(tmp_path / "engine").get("twice", ARGUMENTS, build)
    assert "compiled program" in caplog.text
    assert program(jnp.zeros(3), np.int32(1))["sum"].tolist() == [1, 1, 1]


def test_what_jax_had_kept_is_not_kept_again(tmp_path: Path) -> None:
    def found() -> jax.stages.Compiled:
        jax.monitoring.record_event(kept._FOUND)
        return build()

    store(tmp_path / "engine").get("twice", ARGUMENTS, found)
    assert not (tmp_path / "engine").exists()


def test_jax_says_what_its_cache_finds() -> None:
    """The event that tells has not been renamed."""
    source = Path(jax.__file__).parent / "_src" / "compiler.py"
    assert f"record_event('{kept._FOUND}')" in source.read_text()


def test_nothing_is_kept_without_a_directory() -> None:
    built: list[Callable[[], Any]] = []
    for _ in range(2):
        store(None).get("twice", ARGUMENTS, lambda: built.append(build) or build())
    assert len(built) == 2


def test_the_oldest_are_removed(tmp_path: Path) -> None:
    for age, name in enumerate(("new", "middle", "old")):
        (tmp_path / name).write_bytes(bytes(10))
        os.utime(tmp_path / name, (1000 - age, 1000 - age))
    kept._remove_oldest(tmp_path, 25)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["middle", "new"]


def test_programs_of_a_cpu_are_not_kept() -> None:
    assert kept.directory_of_kept_programs() is None


def test_programs_are_kept_below_jaxs_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    cached = jax.config.jax_compilation_cache_dir
    assert cached is not None
    assert kept.directory_of_kept_programs() == Path(cached) / "engine"


# --- through the engine ---


def test_an_engine_finds_all_of_its_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second compiles nothing and generates the same text."""
    monkeypatch.setattr(programs, "directory_of_kept_programs", lambda: tmp_path / "engine")
    # What jax's own cache gives is not kept.
    monkeypatch.setattr("jax._src.compilation_cache.is_cache_used", lambda backend: False)
    first = Harness(plain())
    text = first.generate(prompt(5), limited(12))
    monkeypatch.setattr(jax.stages.Lowered, "compile", lambda *_, **__: never())
    second = Harness(plain())
    assert second.generate(prompt(5), limited(12)) == text
