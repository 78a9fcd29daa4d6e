"""Runs an engine core step by step and checks every cache entry on the device against the oracle.

After each step, for every running request, module and group: entries that should be exact equal a
teacher-forced recomputation; drafts equal fresh ones; free pages are filled with NaN; published
pages and the null page do not change. A script can force how many drafts each step accepts.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import Oracle

from mmtp_jax.config import CacheConfig, EngineConfig, SpeculativeConfig
from mmtp_jax.engine import sizes
from mmtp_jax.engine.buckets import Bucket
from mmtp_jax.engine.core import EngineCore
from mmtp_jax.engine.delta import TokenDelta
from mmtp_jax.engine.grammar import Grammar
from mmtp_jax.engine.plan import StepOutput, StepPlan
from mmtp_jax.engine.request import Drafts, Request
from mmtp_jax.models.model import assemble, model_graph, random_value
from mmtp_jax.sampling.params import SamplingParams
from mmtp_jax.specs import ModelConfig

# Rounding of float32 grows from module to module: 2.1e-5 was seen in the fourth, with convolutions.
TOLERANCE = float(1e-4 if jax.default_backend() == "gpu" else 4e-5)
# Scores that differ by less may choose another expert in float32.
CLEAR = 1e-6
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


@dataclass
class Scripted:
    """Text a request will produce, and the indices at which its drafts are made wrong."""

    prompt: tuple[int, ...]
    text: tuple[int, ...]
    wrong: frozenset[int] = frozenset()


@dataclass
class Harness:
    """One compiled engine; schedules run on it one after the other."""

    model: ModelConfig
    page_size: int = 4
    num_pages: int = 64
    max_num_seqs: int = 3
    max_model_len: int = 48
    budget: int = 16
    scripted: bool = False
    values: Callable[[str], np.ndarray] | None = None
    prefix_caching: bool = True
    # Draft lengths may vary, and modules fall behind by so many positions before they are lost.
    behind: int | None = None
    # The engine's own controller chooses them, instead of `drafts`.
    controlled: bool = False
    # Modules of prefills, where draft lengths vary; all by default.
    depth: Callable[[Request], int] | None = None
    chunk: Callable[[Request, int], int] = field(default=lambda request, limit: limit)
    drafts: Callable[[Request], Drafts] | None = None

    def __post_init__(self) -> None:
        config = EngineConfig(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.budget,
            row_multiple=self.budget,  # one program: compiling is most of a test's time
            cache=CacheConfig(
                page_size=self.page_size,
                num_pages=self.num_pages,
                enable_prefix_caching=self.prefix_caching,
            ),
            speculative=SpeculativeConfig(adaptive=self.behind is not None),
        )
        graph = model_graph(self.model)
        values = self.values or random_value(graph, 0, np.dtype(np.float32))
        self.oracle = Oracle(self.model, values)
        self.scripts: list[Scripted] = []
        self.failures: list[str] = []
        options = {"choose_draft": self._scripted_draft} if self.scripted else {}
        count = self.model.num_drafts

        def draft(request: Request) -> Drafts:
            return Drafts(count, count) if self.drafts is None else self.drafts(request)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sizes, "KEPT_BEHIND", self.behind)
            self.core = EngineCore(
                config,
                graph,
                assemble(graph, values),
                max_model_len=self.max_model_len,
                chunk_policy=lambda request, limit: self.chunk(request, limit),
                draft_policy=None if self.controlled else draft,
                **options,
            )
        if self.behind is not None and not self.controlled:
            modules = self.model.num_modules
            self.core.scheduler.depth_policy = lambda request: (
                modules if self.depth is None else self.depth(request)
            )
        self._depths: deque[int] = deque()
        step = self.core.device.step

        def counted(bucket: Bucket, plan: StepPlan, *, collect: bool = False) -> Future[StepOutput]:
            self._depths.append(bucket.num_drafts)
            return step(bucket, plan, collect=collect)

        self.core.device.step = counted
        self._texts: dict[tuple[int, ...], list[int]] = {}
        self._published: dict[tuple[int, int], tuple[object, list[np.ndarray]]] = {}
        self._names = 0
        self._draft = 0
        poisoned = functools.partial(_change_pages, lambda array: jnp.full_like(array, jnp.nan))
        self._poison = jax.jit(poisoned, donate_argnums=0)
        flipped = functools.partial(_change_pages, _last_bit_flipped)
        self._flip = jax.jit(flipped, donate_argnums=0)
        self.output: dict[str, list[int]] = {}
        self.deltas: list[TokenDelta] = []

    def text(self, prompt: Sequence[int], count: int) -> tuple[int, ...]:
        """The target's greedy continuation (of the oracle)."""
        known = self._texts.setdefault(tuple(prompt), [])
        if count > len(known):
            known += self.oracle.greedy([*prompt, *known], count - len(known))
            self.oracle.trace([*prompt, *known])  # all at once, for the steps to come
        return tuple(known[:count])

    def add(
        self,
        prompt: Sequence[int],
        params: SamplingParams = GREEDY,
        wrong: Sequence[int] | None = (),
        *,
        grammar: Grammar | None = None,
        text: Sequence[int] | None = None,
    ) -> str:
        """Queue a request; drafts at the indices in `wrong` are made wrong (scripted engines).

        Other drafts are those of `text`, by default the greedy continuation. With None the drafts
        are the modules' own.
        """
        self._names += 1
        name = f"request-{self._names}"
        self.scripts = [script for script in self.scripts if script.prompt != tuple(prompt)]
        if self.scripted and wrong is not None:
            assert params.max_tokens is not None
            if text is None:
                text = self.text(prompt, params.max_tokens)
            self.scripts.append(Scripted(tuple(prompt), tuple(text), frozenset(wrong)))
        seed = self._names if params.seed is None else params.seed
        self.core.add(name, list(prompt), params, seed, grammar=grammar)
        self.output[name] = []
        return name

    def step(self) -> list[TokenDelta]:
        """One engine step with every check."""
        deltas = self.core.step()
        for delta in deltas:
            self.output[delta.request_id].extend(delta.token_ids)
        self.deltas.extend(deltas)
        self.check()
        self.poison()
        assert not self.failures, self.failures
        return deltas

    def run(self, limit: int = 400) -> None:
        """Step until nothing is left; every page must come back."""
        for _ in range(limit):
            if not self.core.has_work:
                break
            self.step()
        assert not self.core.has_work, "no progress"
        self.assert_drained()

    def generate(
        self,
        prompt: Sequence[int],
        params: SamplingParams = GREEDY,
        wrong: Sequence[int] | None = (),
    ) -> list[int]:
        name = self.add(prompt, params, wrong)
        self.run()
        return self.output[name]

    def assert_drained(self) -> None:
        self.core.cache.assert_consistent()
        for pool in self.core.cache.pools:
            assert pool.num_referenced == 0
            assert pool.num_free == pool.num_pages - 1

    def reset(self) -> None:
        """End what a failed schedule left; forget cached prefixes, scripts and policies."""
        self.core.cache.enable_prefix_caching = self.prefix_caching
        self.chunk, self.drafts, self.depth = (lambda request, limit: limit), None, None
        scheduler = self.core.scheduler
        for request in [*scheduler.running, *scheduler.waiting]:
            self.core.finish(request.request_id)
        while self.core.has_work:
            self.core.step()
        self.failures.clear()
        self._depths.clear()
        self._draft = 0
        self.core.cache.reset_prefix_cache()
        self._published.clear()
        self.scripts.clear()
        self.output.clear()
        self.deltas.clear()

    def check(self) -> None:
        state = jax.device_get(self.core.device.state)
        for request in self.core.scheduler.running:
            self._check_request(state, request)
        self._check_published(state)
        for group, arrays in enumerate(state.pages):
            for name, array in arrays.items():
                assert not array[:, 0].any(), f"the null page of group {group} {name} was written"

    def _check_request(self, state, request: Request) -> None:
        slot, config = request.slot, self.model
        length, computed, limit, drafts, _, ran, _ = map(int, state.numbers[slot])
        tokens = tuple(state.tokens[slot, :length].tolist())
        assert list(tokens[: len(request.tokens)]) == request.tokens
        trace = self.oracle.trace(tokens)
        if trace.margin < CLEAR:
            return
        layout = self.core.graph.layout
        where = f"{request.request_id} C={computed} len={length}"
        for index, place in enumerate(layout.target):
            layer = trace.layers[index]
            self._check_layer(state, slot, place, layer, 0, computed, f"{where} layer {index}")
        exact = state.exact[slot]
        # The next step's module rows start where some module is not exact, never below a hit.
        restart = max(min(exact.tolist(), default=0), min(computed, length - config.num_modules))
        rewritten = computed - restart
        if self.behind is not None:
            rewritten = min(computed - min(exact.tolist()), self.core.cache.behind)
        for module, place in enumerate(layout.modules):
            end = int(exact[module])
            if module < ran:  # just now: all entries whose tokens are committed must be exact
                end = max(end, min(computed, length - 1 - module))
            if computed == 0 or end <= 0 or module >= len(trace.modules):
                continue
            if module >= request.depth:  # left out for good
                continue
            layer = trace.modules[module].layer
            self._check_layer(
                state, slot, place, layer, rewritten, end, f"{where} module {module}", computed
            )
        # No later step verifies drafts at the limit; a repeated module may have no page for them.
        held = min(drafts, limit - 1 - length)
        if held > 0 and self._script(tokens) is None:
            drafts = state.tokens[slot, length : length + held].tolist()
            fresh = self.oracle.drafts(tokens)[:held]
            assert drafts == fresh, f"{where}: drafts {drafts} differ from fresh ones {fresh}"

    def _check_layer(self, state, slot, place, trace, rewritten, end, where, computed=None) -> None:
        computed = end if computed is None else computed
        kinds = [("attention", place.attention, trace.attention)]
        if place.conv is not None:
            kinds.append(("convolution", place.conv, trace.conv))
        for kind, (group, layer), streams in kinds:
            assert streams.keys() == state.pages[group].keys()
            window = self.core.graph.layout.groups[group].window
            start = 0
            if window is not None:
                start = max(0, computed - (window - 1) - rewritten)
            position = np.arange(min(start, end), end)
            pages = state.tables[group][slot, position // self.page_size]
            for name, stream in streams.items():
                got = state.pages[group][name][layer, pages, position % self.page_size]
                scale = max(1.0, np.abs(stream).max())
                error = np.abs(got - stream[position]).max(initial=0.0)
                assert error <= TOLERANCE * scale, f"{where} {kind} {name}: differs by {error}"

    def _check_published(self, state) -> None:
        """Bytes of a published page never change while it stays published.

        The last bit of every entry is flipped at publication: recomputing an entry would often give
        the same bits, and writing it again would go unnoticed.
        """
        seen = {}
        fresh = [np.zeros(pool.num_pages, bool) for pool in self.core.cache.pools]
        for group, pool in enumerate(self.core.cache.pools):
            for page in range(1, pool.num_pages):
                key = pool.key(page)
                if key is None:
                    continue
                now = [array[:, page] for array in state.pages[group].values()]
                before = self._published.get((group, page))
                if before is not None and before[0] == key:
                    # NaN, too, where modules were left out.
                    for old, new in zip(before[1], now, strict=True):
                        same = np.array_equal(old.view(np.int32), new.view(np.int32))
                        assert same, f"published page {page} changed"
                else:
                    fresh[group][page] = True
                    now = [(array.view(np.int32) ^ 1).view(np.float32) for array in now]
                seen[group, page] = (key, now)
        self._published = seen
        self.core.device.state = self._flip(self.core.device.state, tuple(fresh))

    def poison(self) -> None:
        """Fill all free pages with NaN (in device order, after the steps in flight)."""
        free = []
        for pool in self.core.cache.pools:
            free.append(
                np.array(
                    [
                        page > 0 and pool.references(page) == 0 and pool.key(page) is None
                        for page in range(pool.num_pages)
                    ]
                )
            )
        self.core.device.state = self._poison(self.core.device.state, tuple(free))

    def _scripted_draft(self, logits, sampling, slot, index, history):
        """Drafts from the scripts, if there is one; also checks the modules' logits."""
        rows = history.at[slot].get(mode="clip")
        shape = jax.ShapeDtypeStruct(index.shape, jnp.int32)
        return jax.pure_callback(
            self._host_draft, shape, logits, index, rows, slot < history.shape[0]
        )

    def _host_draft(self, logits, index, rows, real) -> np.ndarray:
        logits, index, rows, real = (np.asarray(x) for x in (logits, index, rows, real))
        while self._draft >= self._depths[0]:
            self._depths.popleft()
            self._draft = 0
        number, self._draft = self._draft, self._draft + 1
        drafts = np.argmax(logits, axis=1).astype(np.int32)
        for row in np.flatnonzero(real):
            at = int(index[row])
            known = tuple(rows[row, :at].tolist())
            script = self._script(known)
            if script is None:
                continue
            offset = at - len(script.prompt)
            right = 0
            if offset < len(script.text):
                right = script.text[offset]
                want = self.oracle.draft_logits(known, number)
                error = np.abs(logits[row] - want).max()
                close = error <= TOLERANCE * max(1.0, np.abs(want).max())
                if not close and self.oracle.trace(known).margin >= CLEAR:
                    self.failures.append(f"draft {number} at {at}: logits differ by {error}")
            drafts[row] = (right + 1) % self.model.vocab_size if at in script.wrong else right
        return drafts

    def _script(self, known: tuple[int, ...]) -> Scripted | None:
        scripts = (s for s in self.scripts if known[: len(s.prompt)] == s.prompt)
        return next(scripts, None)


def _change_pages(change, state, masks):
    """`change(array)` in the pages that a mask per group selects."""
    pages = tuple(
        {
            name: jnp.where(mask[None, :, *([None] * (array.ndim - 2))], change(array), array)
            for name, array in arrays.items()
        }
        for arrays, mask in zip(state.pages, masks, strict=True)
    )
    return dataclasses.replace(state, pages=pages)


def _last_bit_flipped(array):
    bits = jax.lax.bitcast_convert_type(array, jnp.int32) ^ 1
    return jax.lax.bitcast_convert_type(bits, jnp.float32)
