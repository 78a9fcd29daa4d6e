"""Ahead-of-time compilation for an NVIDIA H200 on a machine without a GPU, and what came out of it.

Needs the extra `aot`: XLA's compiler for CUDA (the plugin of the jax in use) and ptxas. Nothing is
run or tuned, so products are those that XLA chooses without measuring; everything else is the
program that an H200 runs: what of it is one CUDA graph, which arrays it copies, how much scratch
memory it takes, and the registers of its kernels.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest import mock

import jax
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, SingleDeviceSharding

DEVICE_KIND = "NVIDIA H200"
_DISTRIBUTIONS = ("jax-cuda13-plugin", "jax-cuda13-pjrt", "nvidia-cuda-nvcc")
_WRITING = ("fusion", "copy", "copy-start", "transpose", "broadcast")
# Notes ptxas's report of every kernel and passes it on.
_PTXAS = """#!/bin/sh
"{ptxas}" -v "$@" 2> "{logs}/$$.log"
status=$?
cat "{logs}/$$.log" >&2
exit $status
"""


@dataclass(frozen=True)
class Thunk:
    """One command of a program. `kind` is XLA's ("kCustomKernel", "kCopy", "kWhile", ...), `name`
    that of the kernel. What is `captured` is part of a CUDA graph; the host launches the others one
    by one."""

    kind: str
    name: str
    captured: bool


@dataclass(frozen=True)
class Kernel:
    """What ptxas says about a kernel: registers of a thread, and bytes that it stores to and loads
    from memory because there are too few."""

    name: str
    registers: int
    spilled: int


@dataclass(frozen=True)
class Report:
    """A compiled program: its commands in order, its kernels (each compiled once), and its bytes:
    `temp` of scratch memory, `aliased` of arguments that are updated in place."""

    thunks: tuple[Thunk, ...]
    kernels: tuple[Kernel, ...]
    hlo: str
    temp: int
    aliased: int

    @property
    def graphs(self) -> int:
        """CUDA graphs."""
        return sum(thunk.kind == "kCommandBuffer" for thunk in self.thunks)

    @property
    def by_host(self) -> tuple[Thunk, ...]:
        """What the host launches by itself."""
        return tuple(
            thunk
            for thunk in self.thunks
            if not thunk.captured and thunk.kind not in ("kCommandBuffer", "kSequential")
        )

    @property
    def branching(self) -> tuple[Thunk, ...]:
        """Loops and conditionals, whoever decides how they go on: each ends a graph, or costs more
        than several kernels in one."""
        return tuple(t for t in self.thunks if t.kind in ("kWhile", "kConditional"))

    @property
    def spilling(self) -> tuple[Kernel, ...]:
        """Kernels that need more registers than there are."""
        return tuple(kernel for kernel in self.kernels if kernel.spilled)

    def named(self, name: str) -> list[Kernel]:
        """The kernels of a `pallas_call` of this name, in the order of their first commands."""
        by_name = {kernel.name: kernel for kernel in self.kernels}
        # XLA numbers kernels of the same name.
        return [
            by_name[command]
            for command in dict.fromkeys(thunk.name for thunk in self.thunks)
            if command.split("__")[0] == name
        ]

    def sorts(self, length: int) -> list[str]:
        """Instructions that sort so many entries."""
        found = []
        for line in self.hlo.splitlines():
            name, _, made = line.partition(" = ")
            if re.search(r" sort\(|__cub\$", made) and re.search(rf"[\[,]{length}[\],]", made):
                found.append(name.strip())
        return found

    def rewrites(self, array: jax.ShapeDtypeStruct) -> list[str]:
        """Instructions outside of loops that write every entry of an array like this one: copies of
        a cache of which only some rows should be written, in place."""
        short = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}[array.dtype.name]
        shape = f"{short}[{','.join(map(str, array.shape))}]{{"
        found = []
        _, _, main = self.hlo.partition("\nENTRY ")
        for line in main.splitlines():
            name, _, made = line.partition(" = ")
            operation = re.search(r" ([a-z-]+)\(", made)
            if operation is None or shape not in made[: operation.start()]:
                continue
            # A fusion is named after what it does; these write some rows.
            in_place = "scatter" in name or "dynamic_update_slice" in name
            if operation[1] in _WRITING and not in_place:
                found.append(name.strip())
        return found


def missing() -> str | None:
    """Which packages of the extra `aot` are not installed; None if all are."""
    absent = []
    for name in _DISTRIBUTIONS:
        try:
            metadata.version(name)
        except metadata.PackageNotFoundError:
            absent.append(name)
    return f"needs {', '.join(absent)} (the extra 'aot')" if absent else None


@cache
def _sharding() -> SingleDeviceSharding:
    """On the one device of a machine that `h200.txtpb` describes (XLA's `GpuTargetConfigProto`)."""
    described = (Path(__file__).parent / "h200.txtpb").read_text()
    machine = topologies.get_topology_desc(
        DEVICE_KIND, "cuda", target_config=described, topology="1x1x1"
    )
    return SingleDeviceSharding(machine.devices[0])


@contextmanager
def on_h200() -> Iterator[None]:
    """Trace and lower as if an H200 were jax's default device."""
    device = AbstractDevice(device_kind=DEVICE_KIND, num_cores=None, platform="gpu")
    nowhere = AbstractMesh((), (), (), abstract_device=device)
    # Kernels and models ask this function which implementation to take.
    with mock.patch.object(jax, "default_backend", lambda: "gpu"):
        with jax.sharding.use_abstract_mesh(nowhere):
            yield


def compile_for_h200(
    function: Callable[..., Any],
    *arguments: Any,
    donate: int | tuple[int, ...] = (),
    options: Mapping[str, Any] | None = None,
) -> Report:
    """Compile `function` for arguments of these shapes and dtypes (arrays or what describes them);
    those numbered in `donate` may be overwritten. `options` are further ones of the compiler.

    Raises:
        PackageNotFoundError: something of the extra `aot` is not installed (see `missing`).
    """
    described = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=_sharding()), arguments
    )
    with on_h200():
        lowered = jax.jit(function, donate_argnums=donate).trace(*described).lower()
    # A program from the cache would not be compiled, so nothing would be known of its kernels.
    cached = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        with tempfile.TemporaryDirectory(prefix="aot-") as folder:
            return _compile(lowered, Path(folder), options or {})
    finally:
        jax.config.update("jax_enable_compilation_cache", cached)


def _compile(lowered: jax.stages.Lowered, folder: Path, options: Mapping[str, Any]) -> Report:
    cuda, logs, dump = folder / "cuda", folder / "logs", folder / "dump"
    for directory in (cuda / "bin", logs):
        directory.mkdir(parents=True)
    wrapper = cuda / "bin" / "ptxas"
    wrapper.write_text(_PTXAS.format(ptxas=_ptxas(), logs=logs))
    wrapper.chmod(0o755)
    compiled = lowered.compile(
        compiler_options={
            "xla_gpu_cuda_data_dir": str(cuda),
            "xla_dump_to": str(dump),
            "xla_dump_hlo_pass_re": "NONE",
            "xla_backend_optimization_level": 3,  # whatever XLA_FLAGS says
            # A product is one kernel: whether parts of it and a second kernel that adds them up
            # are faster is a matter of measuring.
            "xla_gpu_experimental_force_split_k": 1,
            **options,
        }
    )
    # Where no graph was made there is only the list from before.
    names = ("thunk_sequence_after_thunk_passes", "thunk_sequence")
    lists = [found for name in names for found in dump.glob(f"*.{name}.txt")]
    memory: Any = compiled.memory_analysis()
    return Report(
        thunks=tuple(_thunks(lists[0].read_text())),
        kernels=tuple(kernel for log in logs.iterdir() for kernel in _kernels(log.read_text())),
        hlo=compiled.as_text() or "",
        temp=memory.temp_size_in_bytes,
        aliased=memory.alias_size_in_bytes,
    )


def _ptxas() -> Path:
    files = metadata.files("nvidia-cuda-nvcc") or []
    return next(Path(str(file.locate())) for file in files if file.name == "ptxas")


def _thunks(text: str) -> Iterator[Thunk]:
    """Of XLA's list, which is indented like what is inside of what."""
    graph: int | None = None
    for line in text.splitlines():
        found = re.match(r"( *)\d+: (k\w+) +\[[^\]]*\] *(\S*)", line)
        if found is None:
            continue
        depth, kind, name = len(found[1]), found[2], found[3]
        if graph is not None and depth <= graph:
            graph = None
        yield Thunk(kind, name, captured=graph is not None)
        if kind == "kCommandBuffer" and graph is None:
            graph = depth


def _kernels(log: str) -> Iterator[Kernel]:
    """Of what `ptxas -v` prints for every kernel."""
    for part in log.split("Compiling entry function ")[1:]:
        name = re.match(r"'([^']+)'", part)
        spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads\n", part)
        registers = re.search(r"Used (\d+) registers", part)
        assert name is not None and spills is not None and registers is not None
        yield Kernel(name[1], int(registers[1]), int(spills[1]) + int(spills[2]))
