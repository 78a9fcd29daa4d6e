"""A fixed batch of requests that an engine decodes step by step.

The engine compiles the one program that the batch decodes in, and a second one if prompts are to be
prefilled beside it. All prompts are prefilled in step with each other, so the requests decode at
equal lengths.
"""

from __future__ import annotations

import dataclasses
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from mmtp_jax.bench.acceptance import enter
from mmtp_jax.config import require
from mmtp_jax.engine.core import EngineCore
from mmtp_jax.engine.request import Request
from mmtp_jax.engine.step import Chooser
from mmtp_jax.loader import LoadedModel
from mmtp_jax.progress import CompileBar
from mmtp_jax.sampling.params import SamplingParams
from mmtp_jax.sampling.sampler import sample

GREEDY = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
# Chunks of one long prompt, before the next one takes its place.
CHUNKS_PER_PROMPT = 4
_LONG = "long"


def random_prompts(count: int, length: int, vocab_size: int, seed: int = 0) -> list[list[int]]:
    """Random token ids; a prompt depends on its index, its length and the seed alone."""
    return [
        np.random.default_rng([seed, length, index]).integers(vocab_size, size=length).tolist()
        for index in range(count)
    ]


@contextmanager
def as_served() -> Iterator[None]:
    """Steps within take as long as a server's, whose garbage collector looks at nothing that was
    there before."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def longest_prompt(prefill_chunk: int) -> int:
    """Tokens of a prompt that is prefilled beside the batch."""
    return (CHUNKS_PER_PROMPT + 1) * prefill_chunk + 1


@dataclasses.dataclass(frozen=True)
class Timing:
    """Milliseconds of every step, and the tokens that they emitted all together."""

    milliseconds: tuple[float, ...]
    emitted: int

    @property
    def seconds(self) -> float:
        return sum(self.milliseconds) / 1e3


class FixedBatch:
    """An engine and the prompts it decodes greedily, each in the slot of its index.

    `proposals`, if set, are the drafts by request and index (for a chooser that reads them).
    `prefill_chunk` > 0 leaves room for chunks of so many rows of other prompts beside the batch.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        prompts: list[list[int]],
        choose_draft: Chooser = sample,
        prefill_chunk: int = 0,
    ) -> None:
        width = loaded.graph.config.num_drafts + 1
        self.prompts = prompts
        self.prefill_chunk = prefill_chunk
        self.decode_rows = len(prompts) * width
        rows = self.decode_rows + prefill_chunk
        config = dataclasses.replace(
            loaded.config,
            max_num_seqs=len(prompts) + (prefill_chunk > 0),
            max_num_batched_tokens=rows,
        )
        begin = time.perf_counter()
        with CompileBar(visible=True) as bar:
            self.core = EngineCore(
                config,
                loaded.graph,
                loaded.params,
                max_model_len=loaded.max_model_len,
                progress=bar.update,
                chunk_policy=_chunks(prefill_chunk, rows // len(prompts)),
                choose_draft=choose_draft,
                row_counts=tuple(sorted({self.decode_rows, rows})),
            )
        self.compile_seconds = time.perf_counter() - begin
        self.texts: list[list[int]] = []
        self.proposals: np.ndarray | None = None
        self._num_long = 0

    @property
    def running(self) -> list[Request]:
        """The requests of the batch, without prompts that are prefilled beside it."""
        requests = self.core.scheduler.running
        return [request for request in requests if not request.request_id.startswith(_LONG)]

    def start(self) -> None:
        """Prefill all prompts, up to where every request decodes in every step."""
        self.texts = [list(prompt) for prompt in self.prompts]
        for index, prompt in enumerate(self.prompts):
            self.core.add(str(index), prompt, GREEDY, seed=index)
        scheduler = self.core.scheduler
        while scheduler.waiting or any(request.prefilling for request in scheduler.running):
            self._step()
        if self.proposals is not None:
            # Unread steps may have committed up to a window each.
            width = self.core.num_speculative_tokens + 1
            first = [request.length + width * len(request.in_flight) for request in self.running]
            device = self.core.device
            device.state = enter(device.state, self.proposals, np.asarray(first))

    def steps(self, count: int) -> Timing:
        """Run steps in which the whole batch decodes; `ConfigError` if a request ended."""
        times, emitted = [], 0
        with as_served():
            for _ in range(count):
                begin = time.perf_counter()
                emitted += self._step()
                times.append(1e3 * (time.perf_counter() - begin))
        require(
            len(self.running) == len(self.prompts),
            "requests reached max_model_len or were preempted: raise max_model_len or the cache",
        )
        return Timing(tuple(times), emitted)

    def steps_with_chunks(self, prompts: int) -> Timing:
        """Run steps in which the whole batch decodes beside a chunk of another prompt, for so many
        prompts of several chunks. The last prompt stays, with a chunk and a token to go."""
        timings = []
        for _ in range(prompts):
            self.core.finish(f"{_LONG}{self._num_long}")
            self._num_long += 1
            vocab_size = self.core.graph.config.vocab_size
            length = longest_prompt(self.prefill_chunk)
            (prompt,) = random_prompts(1, length, vocab_size, seed=self._num_long)
            self.core.add(f"{_LONG}{self._num_long}", prompt, GREEDY, seed=0)
            timings.append(self.steps(CHUNKS_PER_PROMPT))
        return Timing(
            tuple(time for timing in timings for time in timing.milliseconds),
            sum(timing.emitted for timing in timings),
        )

    def finish(self) -> None:
        """End all requests, whatever is in flight."""
        for request_id in (*map(str, range(len(self.prompts))), f"{_LONG}{self._num_long}"):
            self.core.finish(request_id)
        while self.core.has_work:
            self.core.step()

    def run_to_the_end(self) -> list[list[int]]:
        """Prompts and greedy continuations, as long as the engine's context."""
        self.start()
        return self.continue_to_the_end()

    def continue_to_the_end(self) -> list[list[int]]:
        """The same, from where the requests are."""
        while self.core.has_work:
            self._step()
        return self.texts

    def _step(self) -> int:
        emitted = 0
        for delta in self.core.step():
            if not delta.request_id.startswith(_LONG):
                self.texts[int(delta.request_id)].extend(delta.token_ids)
                emitted += len(delta.token_ids)
        return emitted


def _chunks(long: int, other: int) -> Callable[[Request, int], int]:
    """Chunks of `long` rows for prompts beside the batch, of `other` rows for the batch's."""

    def policy(request: Request, limit: int) -> int:
        return min(limit, long if request.request_id.startswith(_LONG) else other)

    return policy
