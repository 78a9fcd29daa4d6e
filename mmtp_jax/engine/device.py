"""Everything the engine does on the device: its state, and the programs that change it.

Calls run on the device in the order they were made; none waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

from mmtp_jax.cache.manager import CacheGroup
from mmtp_jax.config import EngineConfig
from mmtp_jax.engine.buckets import Bucket
from mmtp_jax.engine.grammar import fill_masks
from mmtp_jax.engine.live import Batch, Live
from mmtp_jax.engine.plan import RowLogprobs, StepOutput, StepPlan
from mmtp_jax.engine.programs import Programs, Progress, empty_admission
from mmtp_jax.engine.request import ScheduledRequest
from mmtp_jax.engine.scheduler import ScheduledAdmission
from mmtp_jax.engine.state import initial_state, state_sharding
from mmtp_jax.engine.step import Chooser
from mmtp_jax.models.model import ModelGraph, Params


def unrolls_modules() -> bool:
    """Whether modules follow each other in a step: on a GPU a scan would be driven by the host."""
    return jax.default_backend() == "gpu"


class Device:
    """Owns the state; `programs` are compiled here."""

    def __init__(
        self,
        config: EngineConfig,
        graph: ModelGraph,
        params: Params,
        groups: Sequence[CacheGroup],
        sizes: tuple[Bucket, ...],
        *,
        max_model_len: int,
        choose_draft: Chooser,
        progress: Progress | None,
    ) -> None:
        model = graph.config
        self.params = params
        self.state = initial_state(
            graph.layout,
            num_slots=config.max_num_seqs,
            max_model_len=max_model_len,
            num_modules=model.num_modules,
            num_drafts=model.num_drafts,
            num_rows=sizes[-1].num_rows,
            hidden_size=model.hidden_size,
            vocab_size=model.vocab_size,
            num_pages=tuple(group.num_pages for group in groups),
            page_size=config.cache.page_size,
            dtype=graph.dtype(params),
        )
        if graph.mesh is not None:
            self.state = jax.device_put(
                self.state, state_sharding(graph.mesh, graph.layout, self.state)
            )
        self.programs = Programs(
            graph,
            params,
            self.state,
            sizes,
            width=model.num_drafts + 1,
            unroll=unrolls_modules(),
            choose_draft=choose_draft,
            progress=progress,
        )

    def admit(self, scheduled: ScheduledAdmission, live: Live) -> None:
        """Put a request into its slot."""
        request, admission = scheduled.request, scheduled.admission
        arrays = empty_admission(self.state)
        valid = admission.valid[0]
        arrays.numbers[:] = (
            scheduled.slot,
            request.length,
            admission.computed,
            admission.exact,
            valid,
            request.limit,
        )
        arrays.tokens[: request.length] = request.tokens
        for table, row in zip(arrays.tables, admission.rows, strict=True):
            table[: len(row)] = row
        for copy in admission.copies:
            arrays.copy_source[copy.group] = copy.source
            arrays.copy_target[copy.group] = copy.destination
        arrays.sampling[:] = live.row
        self.state = self.programs.admit(self.state, arrays)
        if live.bias is not None:
            self.state = self.programs.set_bias(self.state, np.int32(scheduled.slot), live.bias)

    def upload(self, bucket: Bucket, scheduled: Sequence[ScheduledRequest]) -> StepPlan:
        """The plan of a step, on the device."""
        plan = StepPlan.pack(bucket, self.state.num_slots, scheduled)
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
        self.state = self.programs.set_masks(self.state, slots, starts, masks)

    def step(self, num_rows: int, plan: StepPlan, *, collect: bool = False) -> StepOutput:
        """Run a step, and begin to copy what it answers."""
        program = self.programs.step(num_rows, collect=collect)
        output: StepOutput
        self.state, output = program(self.params, self.state, plan)
        output.packed.copy_to_host_async()
        return output

    def logprobs(self, num_rows: int) -> RowLogprobs:
        """The log-probabilities of the first rows of the latest step, which begin to be copied."""
        logprobs: RowLogprobs
        logprobs = self.programs.logprobs(self.params, self.state, np.int32(num_rows))
        for leaf in jax.tree.leaves(logprobs):
            leaf.copy_to_host_async()
        return logprobs
