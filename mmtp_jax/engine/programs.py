"""Compiles every program of the engine before the first request, in parallel, with a progress bar.

Nothing compiles afterwards: the executables are called directly and would refuse other shapes.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from mmtp_jax.engine.buckets import Bucket, round_up
from mmtp_jax.engine.kept import KeptPrograms, directory_of_kept_programs
from mmtp_jax.engine.logprobs import row_logprobs
from mmtp_jax.engine.plan import StepPlan
from mmtp_jax.engine.state import AdmissionArrays, EngineState, admit
from mmtp_jax.engine.step import Chooser, StepShape, step
from mmtp_jax.models.model import ModelGraph, Params
from mmtp_jax.sampling.sampler import sample
from mmtp_jax.sampling.state import write_bias, write_masks
from mmtp_jax.weights.resolve import cache_directory

Progress = Callable[[int, int, str], None]
CACHED_PROGRAMS_BYTES = 2 << 30
# Requests that enter together: a call takes as long for one as for several.
ADMISSIONS_PER_CALL = 8
# Requests whose masks travel together.
MASKS_PER_UPLOAD = 8
# Products of so many rows are computed by cuBLAS, those of fewer by kernels that XLA generates and
# tunes. On an H200, generated / cuBLAS: llama3-8b at 1, 16 and 64 rows 4.28 / 4.69, 4.73 / 4.90 and
# 7.02 / 6.78 ms per step; SmolLM2 with four drafts at 40, 320 and 1,280 rows 1.14 / 1.13,
# 1.76 / 1.47 and 3.19 / 2.55.
CUBLAS_ROWS = 64
# What keeps XLA from recording kernels in CUDA graphs.
ONE_BY_ONE = {"xla_gpu_enable_command_buffer": ""}


def enable_compilation_cache(directory: Path | None = None) -> None:
    """Keep compiled programs, and below them what a GPU's kernels were tuned to (jax's default), on
    disk (None: in `xla` of the cache directory) unless the user chose a directory of their own.

    Without a directory to write to, every start compiles anew: that is worth a warning only.
    """
    if directory is None:
        directory = cache_directory() / "xla"
    if jax.config.jax_compilation_cache_dir is not None:
        return
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        warnings.warn(f"compiled programs are not kept: {error}", stacklevel=2)
        return
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    # With a limit jax locks the directory, else another process may read a half-written entry.
    # Where nobody can write, the lock could not be taken and is not needed, and XLA fails where it
    # cannot write what it tuned.
    if os.access(directory, os.W_OK):
        jax.config.update("jax_compilation_cache_max_size", CACHED_PROGRAMS_BYTES)
    else:
        jax.config.update("jax_persistent_cache_enable_xla_caches", None)


def _set_bias(state: EngineState, slot: jax.Array, bias: jax.Array) -> EngineState:
    return dataclasses.replace(state, sampling=write_bias(state.sampling, slot, bias))


def _set_masks(
    state: EngineState, slots: jax.Array, starts: jax.Array, masks: jax.Array
) -> EngineState:
    sampling = write_masks(state.sampling, slots, starts, masks)
    return dataclasses.replace(state, sampling=sampling)


def product_options(num_rows: int) -> dict[str, Any]:
    """XLA's options for a program of so many rows on a GPU."""
    return {"xla_gpu_enable_triton_gemm": num_rows < CUBLAS_ROWS}


def _name(bucket: Bucket) -> str:
    return f"step of {bucket.num_rows} rows and {bucket.num_drafts} drafts"


class Programs:
    """The compiled step of every bucket, admission, and the uploads of biases and masks."""

    def __init__(
        self,
        graph: ModelGraph,
        params: Params,
        state: EngineState,
        buckets: tuple[Bucket, ...],
        *,
        width: int,
        unroll: bool,
        eager: bool = False,
        choose_draft: Chooser = sample,
        progress: Progress | None = None,
    ) -> None:
        self._graph = graph
        self._params = params
        self._width = width
        self._unroll = unroll
        self._eager = eager
        self._choose_draft = choose_draft
        self._num_slots = state.num_slots
        self.abstract_state = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state
        )
        # Over several devices the next step must find the state as this one did.
        self._state_sharding = None
        if graph.mesh is not None:
            self._state_sharding = jax.tree.map(lambda leaf: leaf.sharding, state)
        # A plan is put there as every device reads it.
        self._plan_sharding = None
        if graph.mesh is not None:
            self._plan_sharding = NamedSharding(graph.mesh, PartitionSpec())
        self._collecting: dict[Bucket, Any] = {}
        directory = directory_of_kept_programs() if graph.mesh is None else None
        (device, *_) = jax.tree.leaves(self.abstract_state)[0].sharding.device_set
        self._kept = KeptPrograms(directory, device, (graph.config, eager))
        self.buckets = buckets
        jobs: dict[str, Callable[[], Any]] = {
            _name(bucket): functools.partial(self._compile_step, bucket)
            for bucket in reversed(buckets)
        }
        jobs["admission"] = lambda: self._compile(admit, self.empty_admission())
        jobs["bias"] = lambda: self._compile(
            _set_bias, np.int32(0), np.zeros(graph.config.vocab_size, np.float32)
        )
        jobs["masks"] = lambda: self._compile(_set_masks, *self.empty_masks(1))
        jobs["log-probabilities"] = self._compile_logprobs
        done = {}
        with ThreadPoolExecutor(max_workers=min(len(jobs), os.cpu_count() or 1)) as pool:
            futures = {pool.submit(job): name for name, job in jobs.items()}
            for future in as_completed(futures):
                done[futures[future]] = future.result()
                if progress is not None:
                    progress(len(done), len(jobs), futures[future])
        self.admit = done["admission"]
        self.set_bias = done["bias"]
        self._upload_masks = done["masks"]
        self.logprobs = done["log-probabilities"]
        self._steps = {bucket: done[_name(bucket)] for bucket in buckets}

    @property
    def num_programs(self) -> int:
        return len(self._steps) + 4

    def empty_admission(self) -> AdmissionArrays:
        """Room for as many requests as enter in one call."""
        return AdmissionArrays.empty(self.abstract_state, min(self._num_slots, ADMISSIONS_PER_CALL))

    def empty_masks(self, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Slots, starts and masks of `count` requests or a few more, as whole uploads: nothing but
        padding that allows every token."""
        num_slots, width, words = self.abstract_state.sampling.masks.shape
        size = round_up(count, min(num_slots, MASKS_PER_UPLOAD))
        return (
            np.full(size, num_slots, np.int32),
            np.full(size, -1, np.int32),
            np.full((size, width, words), -1, np.int32),
        )

    def set_masks(
        self, state: EngineState, slots: np.ndarray, starts: np.ndarray, masks: np.ndarray
    ) -> EngineState:
        """Write arrays as from `empty_masks` into the state."""
        size = min(self._num_slots, MASKS_PER_UPLOAD)
        for first in range(0, len(slots), size):
            part = slice(first, first + size)
            state = self._upload_masks(state, slots[part], starts[part], masks[part])
        return state

    def upload(self, plan: StepPlan) -> StepPlan:
        """The plan on the device, for one step or many: a step does not consume it."""
        placed: StepPlan = jax.device_put(plan, self._plan_sharding)
        return placed

    def step(self, bucket: Bucket, *, collect: bool = False) -> Any:
        """The executable `(params, state, plan) -> (state, output)` of a bucket. The variant that
        also returns every row's logits (scoring) is compiled when it is first asked for."""
        if not collect:
            return self._steps[bucket]
        if bucket not in self._collecting:
            self._collecting[bucket] = self._compile_step(bucket, collect=True)
        return self._collecting[bucket]

    def _compile(self, function: Callable[..., EngineState], *arguments: Any) -> Any:
        program = jax.jit(function, donate_argnums=0, out_shardings=self._state_sharding)
        name = function.__qualname__
        return self._compiled(name, 0, program, self.abstract_state, *arguments)

    def _compile_logprobs(self) -> Any:
        program = jax.jit(functools.partial(row_logprobs, self._graph))
        arguments = (self._params, self.abstract_state, np.int32(0))
        return self._compiled(row_logprobs.__qualname__, CUBLAS_ROWS, program, *arguments)

    def _compile_step(self, bucket: Bucket, collect: bool = False) -> Any:
        shape = StepShape(
            num_rows=bucket.num_rows,
            num_drafts=bucket.num_drafts,
            width=self._width,
            logit_rows=bucket.logit_rows,
            collect=collect,
            unroll=self._unroll,
        )
        choose = self._choose_draft
        program = jax.jit(
            functools.partial(step, self._graph, shape, choose),
            donate_argnums=1,
            out_shardings=None if self._state_sharding is None else (self._state_sharding, None),
        )
        plan = self.upload(StepPlan.pack(bucket, self._num_slots))
        # What a function does that is made elsewhere, or while it runs, its name does not tell.
        known = choose.__module__.startswith("mmtp_jax.") and "<" not in choose.__qualname__
        name = (shape, choose.__module__, choose.__qualname__) if known else None
        return self._compiled(
            name, bucket.num_rows, program, self._params, self.abstract_state, plan
        )

    def _compiled(self, name: object | None, num_rows: int, program: Any, *arguments: Any) -> Any:
        """`program`, of so many rows, for such arguments; `name` tells it from the others that are
        kept (None: it is not)."""
        options = product_options(num_rows) if jax.default_backend() == "gpu" else {}
        options |= ONE_BY_ONE if self._eager else {}

        def build() -> jax.stages.Compiled:
            with self._on_mesh():
                lowered = program.lower(*arguments)
                # None: with options, jax compiles again what this process has compiled.
                compiled: jax.stages.Compiled = lowered.compile(options or None)
            return compiled

        return build() if name is None else self._kept.get(name, arguments, build)

    def _on_mesh(self) -> AbstractContextManager[object]:
        mesh = self._graph.mesh
        return nullcontext() if mesh is None else jax.set_mesh(mesh)
