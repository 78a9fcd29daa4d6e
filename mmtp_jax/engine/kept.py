"""Compiled programs on disk, found without tracing them.

jax's own cache of compiled programs knows them by what they are lowered to, so a start that finds
them all still traces and lowers each: on an H200 most of its time, as Python does one at a time.
Here they are known by what that follows from: the source of these packages, the versions of jax and
of the compiler, the device, the settings of both, the model, and the arguments' shapes.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import pickle
import tempfile
import threading
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable

import pallas_kernels

_FOUND = "/jax/compilation_cache/cache_hits"
KEPT_BYTES = 2 << 30

logger = logging.getLogger(__name__)


def directory_of_kept_programs() -> Path | None:
    """Below jax's cache of compiled programs; None where there is none or nobody may write to it,
    and on a CPU, whose programs run only where it has all instructions that they were given."""
    directory = jax.config.jax_compilation_cache_dir
    if directory is None or not jax.config.jax_enable_compilation_cache:
        return None
    if jax.default_backend() == "cpu" or not os.access(directory, os.W_OK):
        return None
    return Path(directory) / "engine"


# Everything that is traced here.
_SOURCE = (Path(__file__).parents[1], Path(pallas_kernels.__file__).parent)


@functools.cache
def source_digest(roots: tuple[Path, ...] = _SOURCE) -> str:
    """Of the Python files below `roots`, their names and contents."""
    digest = hashlib.sha256()
    for root in roots:
        for file in sorted(root.rglob("*.py")):
            digest.update(f"{file.relative_to(root)}\0{file.stat().st_size}\0".encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()


def _settings() -> list[tuple[str, str]]:
    """Of jax and XLA, from their configuration and from the environment. One that has no effect on
    programs costs a compilation when it changes, no more."""
    named = {name: repr(value) for name, value in jax.config.values.items()}
    del named["jax_compilation_cache_dir"]
    named |= {
        name: value for name, value in os.environ.items() if name.startswith(("XLA_", "NVIDIA_"))
    }
    return sorted(named.items())


class _Found(threading.local):
    """How many programs jax's own cache has given to this thread."""

    programs = 0


@functools.cache
def _found_by_jax() -> _Found:
    """Counts from the first call on."""
    found = _Found()

    def listen(event: str, **_: object) -> None:
        if event == _FOUND:
            found.programs += 1

    jax.monitoring.register_event_listener(listen)
    return found


def _described(arguments: Any) -> tuple[str, ...]:
    """Structure, shapes, dtypes and devices of a program's arguments."""
    leaves, structure = jax.tree.flatten(arguments)
    return (
        str(structure),
        *(f"{leaf.dtype}{leaf.shape}{getattr(leaf, 'sharding', None)}" for leaf in leaves),
    )


def _common(device: jax.Device, facts: object) -> str:
    """What all programs of a model follow from."""
    return repr(
        (
            source_digest(),
            [metadata.version(name) for name in ("jax", "jaxlib", "flax")],
            (device.platform, device.device_kind, device.id, device.client.platform_version),
            _settings(),
            facts,
        )
    )


class KeptPrograms:
    """Programs for one device, of one model.

    `directory` None: nothing is kept. `facts` is whatever beside the arguments a program follows
    from; equal `repr`s mean equal programs.
    """

    def __init__(self, directory: Path | None, device: jax.Device, facts: object) -> None:
        self._directory = directory
        self._device = device
        # Here, once: programs are asked for by many threads at the same time.
        self._common = "" if directory is None else _common(device, facts)

    def get(
        self, name: object, arguments: tuple[Any, ...], build: Callable[[], jax.stages.Compiled]
    ) -> jax.stages.Compiled:
        """The program that `repr(name)` tells from the others, for such arguments: loaded, else
        built and kept. What cannot be read or written is built."""
        if self._directory is None:
            return build()
        said = "\n".join((self._common, repr(name), *_described(arguments)))
        path = self._directory / hashlib.sha256(said.encode()).hexdigest()
        try:
            return self._load(path)
        except FileNotFoundError:
            pass
        except Exception as error:  # half of a file, or one of another jax: there are many ways
            logger.warning("cannot load the compiled program %s: %s", path.name, error)
        found = _found_by_jax()
        before = found.programs
        program = build()
        # One that was loaded cannot be written down again (on a CPU it lacks its functions then).
        if found.programs != before:
            return program
        try:
            self._keep(path, program)
        except Exception as error:  # a full disk, or a program that jax cannot write down
            logger.warning("cannot keep the compiled program %s: %s", path.name, error)
        return program

    def _load(self, path: Path) -> jax.stages.Compiled:
        executable, arguments, results = pickle.loads(path.read_bytes())
        os.utime(path)  # the oldest are removed first
        program: jax.stages.Compiled = serialize_executable.deserialize_and_load(
            executable,
            arguments,
            results,
            backend=self._device.client,
            execution_devices=[self._device],
        )
        return program

    def _keep(self, path: Path, program: jax.stages.Compiled) -> None:
        """Under its name once it is whole, since other processes may look for it."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            try:
                file.write(pickle.dumps(serialize_executable.serialize(program)))
                file.close()
                os.replace(file.name, path)
            except BaseException:
                os.unlink(file.name)
                raise
        _remove_oldest(path.parent, KEPT_BYTES)


def _remove_oldest(directory: Path, most: int) -> None:
    """Until the files of `directory` have `most` bytes."""
    found = []
    for file in directory.iterdir():
        try:
            found.append((file.stat(), file))
        except FileNotFoundError:  # by another process, just now
            continue
    total = sum(stat.st_size for stat, _ in found)
    for stat, file in sorted(found, key=lambda one: one[0].st_mtime):
        if total <= most:
            return
        file.unlink(missing_ok=True)
        total -= stat.st_size
