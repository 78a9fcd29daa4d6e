"""Everything the engine does on the device: its state, and the programs that change it.

A thread of its own calls the programs, one after the other: a call keeps the host busy for about as
long as a small model's step keeps an H200 (SmolLM2, one request: 0.7 of 0.8 ms), mostly outside of
the interpreter, and the engine's loop has requests to look after meanwhile.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import jax
import numpy as np

from mmtp_jax.cache.manager import CacheGroup
from mmtp_jax.config import ConfigError, EngineConfig
from mmtp_jax.engine.buckets import Bucket
from mmtp_jax.engine.grammar import fill_masks
from mmtp_jax.engine.live import Batch, Live
from mmtp_jax.engine.plan import RowLogprobs, StepOutput, StepPlan
from mmtp_jax.engine.programs import ADMISSIONS_PER_CALL, Programs, Progress
from mmtp_jax.engine.request import ScheduledRequest
from mmtp_jax.engine.scheduled import ScheduledAdmission
from mmtp_jax.engine.state import AdmissionArrays, EngineState, initial_state, state_sharding
from mmtp_jax.engine.step import Chooser
from mmtp_jax.models.model import ModelGraph, Params


def unrolls_modules() -> bool:
    """Whether modules follow each other in a step: on a GPU a scan would be driven by the host."""
    return jax.default_backend() == "gpu"


class Device:
    """Owns the state. Methods return at once; what they ask for is done in their order.

    `ConfigError` if there is no room for the state.
    """

    def __init__(
        self,
        config: EngineConfig,
        graph: ModelGraph,
        params: Params,
        groups: Sequence[CacheGroup],
        sizes: tuple[Bucket, ...],
        *,
        max_model_len: int,
        lag: int,
        choose_draft: Chooser,
        progress: Progress | None,
    ) -> None:
        model = graph.config
        self.params = params
        make = functools.partial(
            initial_state,
            graph.layout,
            num_slots=config.limits.max_num_seqs,
            max_model_len=max_model_len,
            num_modules=model.num_modules,
            num_drafts=model.num_drafts,
            lag=lag,
            num_rows=sizes[-1].num_rows,
            hidden_size=model.hidden_size,
            vocab_size=model.vocab_size,
            num_pages=tuple(group.num_pages for group in groups),
            page_size=config.cache.page_size,
            dtype=graph.dtype(params),
        )
        self._state = state = _allocate(make, graph)
        self._error: BaseException | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="mmtp-device")
        self.programs = Programs(
            graph,
            params,
            state,
            sizes,
            width=model.num_drafts + 1,
            unroll=unrolls_modules(),
            eager=config.enforce_eager,
            choose_draft=choose_draft,
            progress=progress,
        )

    @property
    def state(self) -> EngineState:
        """What the calls made so far leave."""
        return self._call(lambda state: (state, state)).result()

    @state.setter
    def state(self, state: EngineState) -> None:
        self._call(lambda _: (state, None))

    def _call[T](self, function: Callable[[EngineState], tuple[EngineState, T]]) -> Future[T]:
        """Let the thread call `function(state) -> (state, result)`. After a failure, which leaves
        no state, every call fails in the same way."""

        def call() -> T:
            if self._error is not None:
                raise self._error
            try:
                self._state, result = function(self._state)
            except BaseException as error:
                self._error = error
                raise
            return result

        return self._thread.submit(call)

    def admit(self, entering: Sequence[tuple[ScheduledAdmission, Live]]) -> None:
        """Put the requests of a step into their slots, several at once."""
        for few in itertools.batched(entering, ADMISSIONS_PER_CALL):
            arrays = self.programs.empty_admission()
            for index, (scheduled, live) in enumerate(few):
                _enter(arrays, index, scheduled, live)
            self._call(functools.partial(self._admit, arrays, few))

    def _admit(
        self,
        arrays: AdmissionArrays,
        entering: Sequence[tuple[ScheduledAdmission, Live]],
        state: EngineState,
    ) -> tuple[EngineState, None]:
        state = self.programs.admit(state, arrays)
        for scheduled, live in entering:
            if live.bias is not None:
                state = self.programs.set_bias(state, np.int32(scheduled.slot), live.bias)
        return state, None

    def upload(self, bucket: Bucket, scheduled: Sequence[ScheduledRequest]) -> StepPlan:
        """The plan of a step, on the device."""
        plan = StepPlan.pack(bucket, self.programs.abstract_state.num_slots, scheduled)
        return self.programs.upload(plan)

    def set_masks(self, batch: Batch) -> None:
        """Say what the grammars allow in the rows that the next step samples from."""
        masked = [
            (row, one.grammar, one.drafts[: row.num_rows - 1])
            for row, one in zip(batch.requests, batch.live, strict=True)
            if one.grammar is not None and row.samples
        ]
        if not masked:
            return
        slots, starts, masks = self.programs.empty_masks(len(masked))
        for index, (row, _, _) in enumerate(masked):
            slots[index], starts[index] = row.slot, row.request.length
        fill_masks(masks, [(grammar, drafts) for _, grammar, drafts in masked])
        self._call(lambda state: (self.programs.set_masks(state, slots, starts, masks), None))

    def step(self, bucket: Bucket, plan: StepPlan, *, collect: bool = False) -> Future[StepOutput]:
        """Run a step, and begin to copy what it answers."""

        def step(state: EngineState) -> tuple[EngineState, StepOutput]:
            program = self.programs.step(bucket, collect=collect)
            state, output = program(self.params, state, plan)
            output.packed.copy_to_host_async()
            return state, output

        return self._call(step)

    def logprobs(self, num_rows: int) -> Future[RowLogprobs]:
        """The log-probabilities of the first rows of the latest step, which begin to be copied."""

        def compute(state: EngineState) -> tuple[EngineState, RowLogprobs]:
            logprobs = self.programs.logprobs(self.params, state, np.int32(num_rows))
            for leaf in jax.tree.leaves(logprobs):
                leaf.copy_to_host_async()
            return state, logprobs

        return self._call(compute)


def _allocate(make: Callable[[], EngineState], graph: ModelGraph) -> EngineState:
    """The state, in memory. What was not allocated would be known by the first step that is read
    otherwise: calls do not wait for the device."""
    try:
        state = make()
        if graph.mesh is not None:
            state = jax.device_put(state, state_sharding(graph.mesh, graph.layout, state))
        jax.block_until_ready(state)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        arrays = jax.tree.leaves(jax.eval_shape(make))
        size = sum(array.size * array.dtype.itemsize for array in arrays)
        raise ConfigError(
            f"the device has no room for {size} bytes of caches beside the model: lower"
            " memory_fraction, cache_bytes or num_pages"
        ) from error
    return state


def _enter(arrays: AdmissionArrays, index: int, scheduled: ScheduledAdmission, live: Live) -> None:
    """Write what a request enters with."""
    request, admission = scheduled.request, scheduled.admission
    arrays.numbers[index] = (
        scheduled.slot,
        request.length,
        admission.computed,
        admission.exact,
        admission.valid[0],
        request.limit,
    )
    arrays.tokens[index, : request.length] = request.tokens
    for table, row in zip(arrays.tables, admission.rows, strict=True):
        table[index, : len(row)] = row
    for copy in admission.copies:
        arrays.copy_source[index, copy.group] = copy.source
        arrays.copy_target[index, copy.group] = copy.destination
    arrays.sampling[index] = live.row
