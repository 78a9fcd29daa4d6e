"""The scheduler against a simulated device that runs one step ahead of what the host has read."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
from cache.symbolic_device import STOP_TOKEN, VOCABULARY, Language, SymbolicDevice
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from mmtp_jax.cache import manager, prefix
from mmtp_jax.cache.keys import PageKey, PrefixKeys
from mmtp_jax.cache.manager import CacheGroup, CacheManager, PageTables
from mmtp_jax.cache.pool import PagePool
from mmtp_jax.cache.prefix import PrefixSearch
from mmtp_jax.config import CacheConfig, ConfigError, EngineConfig
from mmtp_jax.engine.buckets import CPU_SPACING, Bucket, buckets, depths_below
from mmtp_jax.engine.request import Drafts, FinishReason, Request, RequestStatus
from mmtp_jax.engine.scheduled import ScheduledStep
from mmtp_jax.engine.scheduler import Scheduler
from mmtp_jax.engine.scheduler_config import SchedulerConfig

MAX_MODEL_LEN = 32


def make_cache(
    num_modules: int,
    page_size: int,
    num_pages: int,
    windows: tuple[int | None, ...] = (None,),
    prefix_caching: bool = True,
    behind: int | None = None,
) -> CacheManager:
    """Per window a target group and, with modules, one of theirs; `num_pages` are usable. Modules
    may fall `behind` by so many positions."""
    groups = []
    for window in windows:
        groups.append(
            CacheGroup(f"target/{window}", "target", window, num_pages + 1, page_size),
        )
        if num_modules:
            groups.append(
                CacheGroup(f"modules/{window}", "modules", window, num_pages + 1, page_size)
            )
    return CacheManager(groups, num_modules, prefix_caching, behind)


class Server:
    """A scheduler with a device: dispatches steps and reads them up to `depth` steps later.

    With `vary` chunks and verified drafts are random, with `adaptive` those that are proposed too.
    """

    def __init__(
        self,
        cache: CacheManager,
        *,
        rng: random.Random,
        depth: int = 1,
        max_num_seqs: int = 3,
        max_num_batched_tokens: int = 16,
        max_chunk: int | None = None,
        vary: bool = False,
        adaptive: bool = False,
        stop_every: int | None = None,
        awaiting: float = 0.0,
        ahead: int = 0,
        row_counts: tuple[int, ...] = (4,),
    ) -> None:
        self.cache = cache
        self.awaiting = awaiting
        self.rng = rng
        self.depth = depth
        self.adaptive = adaptive
        engine = EngineConfig(
            max_num_seqs=max(max_num_seqs, 1),
            max_num_batched_tokens=max(max_num_batched_tokens, cache.num_modules + 1),
            cache=CacheConfig(page_size=cache.page_size),
        )
        self.config = SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=MAX_MODEL_LEN,
            num_speculative_tokens=cache.num_modules,
            buckets=buckets(
                engine,
                num_modules=cache.num_modules,
                width=cache.num_modules + 1,
                num_groups=len(cache.groups),
                ahead=ahead,
                row_counts=tuple(
                    sorted(
                        {max(count, cache.num_modules) for count in row_counts}
                        | {max_num_batched_tokens}
                    )
                ),
                depths=depths_below(cache.num_modules, CPU_SPACING) if adaptive else (),
            ),
            max_chunk=max_chunk,
            ahead=ahead,
        )

        def draft(request: Request) -> Drafts:
            count = cache.num_modules
            # Long stretches of few drafts make modules fall behind.
            propose = rng.choice([rng.randint(0, count), request.proposed]) if adaptive else count
            return Drafts(rng.randint(0, count), propose)

        def prefilled(request: Request) -> int:
            return rng.choice([cache.num_modules, rng.randint(0, cache.num_modules)])

        self.scheduler = Scheduler(
            self.config,
            cache,
            chunk_policy=(lambda request, limit: rng.randint(1, limit)) if vary else None,
            draft_policy=draft if vary or adaptive else None,
            depth_policy=prefilled if adaptive else None,
        )
        self.language = Language(stop_every)
        self.device = SymbolicDevice(cache, self.language, rng)
        self.requests: list[Request] = []
        self.finished: list[Request] = []
        self.first_starts: list[int] = []
        self.restarts = 0
        self.unread: deque[tuple[ScheduledStep, list[tuple[int, ...]]]] = deque()

    def add(self, prompt: list[int], max_tokens: int) -> Request:
        request = Request.create(str(len(self.requests)), prompt, max_tokens, MAX_MODEL_LEN)
        request.awaits_result = self.rng.random() < self.awaiting
        self.scheduler.add(request)
        self.requests.append(request)
        return request

    def dispatch(self) -> ScheduledStep | None:
        if self.adaptive and self.scheduler.running and self.rng.random() < 0.1:
            self.restarts += 1
            self.scheduler.restart(self.rng.choice(self.scheduler.running))
        step = self.scheduler.schedule()
        self.check()
        if step is None:
            return None
        for admission in step.admissions:
            request = admission.request
            if request.incarnation == 0:
                self.first_starts.append(request.arrival)
            self.device.admit(
                admission.slot, request.tokens, request.limit, request.depth, admission.admission
            )
        cost = sum(max(row.num_rows, self.cache.num_modules) for row in step.requests)
        if not self.adaptive:
            assert step.bucket == min(b for b in self.config.buckets if b.num_rows >= cost)
            assert cost <= self.config.max_num_batched_tokens
        entries = [new for row in step.requests for group in row.entries for new in group]
        assert len(entries) <= step.bucket.num_entries
        assert len(step.requests) <= step.bucket.num_requests
        slots = [row.slot for row in step.requests]
        assert len(set(slots)) == len(slots) and max(slots) < self.config.max_num_seqs
        results = []
        num_rows = 0
        for row in step.requests:
            assert row.num_rows >= 1 and row.num_drafts <= step.bucket.num_drafts
            assert row.num_drafts <= row.request.depth
            assert not row.request.prefilling or row.num_drafts == row.request.depth
            unread = sum(step.samples for step in row.request.in_flight)
            assert row.request.length + unread <= row.request.limit, "a row that cannot emit"
            if row.request.awaits_result:
                assert unread == row.samples, "a step that samples is unread"
            emitted = self.device.step(
                row.slot, row.num_rows, row.num_drafts, row.capacity, row.entries
            )
            num_rows += self.device.most_rows
            assert row.samples or not emitted
            results.append(emitted)
        assert num_rows <= min(step.bucket.num_rows, self.config.max_num_batched_tokens)
        self.unread.append((step, results))
        return step

    def read(self) -> None:
        step, results = self.unread.popleft()
        for row, emitted in zip(step.requests, results, strict=True):
            if not row.is_current:
                continue
            reason: FinishReason | None = None
            if emitted and emitted[-1] == STOP_TOKEN:
                reason = "stop"
            if self.scheduler.update(row, emitted, reason):
                self.finished.append(row.request)
        self.device.check_published()

    def advance(self) -> None:
        """Dispatch a step, then read the one before (all of them once nothing can run)."""
        step = self.dispatch()
        while self.unread and (step is None or len(self.unread) > self.depth):
            self.read()

    def drain(self) -> None:
        """Run until all requests ended; everything must come back and every text be right."""
        work = sum(request.limit for request in self.requests)
        for _ in range(20 * work + 20):
            if not self.scheduler.has_requests:
                break
            self.advance()
        assert not self.scheduler.has_requests, "no progress"
        while self.unread:
            self.read()
        self.check()
        assert all(pool.num_referenced == 0 for pool in self.cache.pools)
        ended = [r for r in self.requests if r.finish_reason != "abort"]
        assert sorted(r.arrival for r in self.finished) == [r.arrival for r in ended]
        assert self.first_starts == sorted(self.first_starts), "a request was overtaken"
        for request in self.requests:
            self.check_text(request)

    def check(self) -> None:
        self.cache.assert_consistent()
        waiting = [request.arrival for request in self.scheduler.waiting]
        running = [request.arrival for request in self.scheduler.running]
        assert running == sorted(running) and waiting == sorted(waiting)
        assert running + waiting == sorted(running + waiting) or self.restarts
        held = {request.slot for request in self.scheduler.running}
        assert len(held) == len(running) and held <= set(range(self.config.max_num_seqs))

    def check_text(self, request: Request) -> None:
        assert request.status is RequestStatus.FINISHED
        expected = self.language.continuation(request.prompt_ids, len(request.output_ids))
        assert request.output_ids == expected, "a token was lost, repeated or made up"
        assert request.length <= request.limit
        if request.finish_reason == "length":
            assert request.length == request.limit
        if request.finish_reason == "stop":
            assert request.tokens[-1] == STOP_TOKEN
        assert STOP_TOKEN not in request.output_ids[:-1]


def random_prompt(server: Server, rng: random.Random) -> list[int]:
    """New tokens, often after a part of an earlier conversation."""
    prompt: list[int] = []
    if server.requests and rng.random() < 0.8:
        earlier = rng.choice(server.requests).tokens
        prompt = earlier[: rng.randint(len(earlier) // 2, len(earlier))]
    prompt += [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 6))]
    return prompt[: MAX_MODEL_LEN - 1]


def run_random(seed: int, num_modules: int | None = None, page_size: int | None = None) -> Server:
    """A random configuration under random load, drained at the end."""
    rng = random.Random(seed)
    n = rng.randint(0, 8) if num_modules is None else num_modules
    page = rng.choice([1, 2, 3, 4, 8, 16]) if page_size is None else page_size
    pages = -(-MAX_MODEL_LEN // page)
    windows = rng.choice([(None,), (None, 3), (None, 5, 1), (6,)])
    adaptive = n > 0 and rng.random() < 0.5
    behind = max(n - 1, 0) + rng.choice([0, 1, 7]) if adaptive else None
    num_pages = pages + rng.choice([0, 0, 2, pages, 3 * pages])
    cache = make_cache(n, page, num_pages, windows, behind=behind)
    server = Server(
        cache,
        rng=rng,
        depth=rng.choice([0, 1, 1, 2]),
        max_num_seqs=rng.randint(1, 4),
        max_num_batched_tokens=rng.randint(n + 1, 24),
        max_chunk=rng.choice([None, 1, 2, 5]),
        vary=rng.random() < 0.7,
        adaptive=adaptive,
        stop_every=rng.choice([None, 10]),
        awaiting=rng.choice([0.0, 0.5, 1.0]),
        ahead=(0, 3, 8, 64)[seed % 4],
    )
    for _ in range(rng.randint(2, 20)):
        server.add(random_prompt(server, rng), rng.randint(1, 12))
        for _ in range(rng.choice([0, 1, 2, 8])):
            server.advance()
        if rng.random() < 0.15:
            server.scheduler.abort(rng.choice(server.requests).request_id)
        if rng.random() < 0.05:
            cache.reset_prefix_cache()
    server.drain()
    return server


@pytest.mark.parametrize("num_modules", range(9))
@pytest.mark.parametrize("seeds", [4, pytest.param(40, marks=pytest.mark.slow)])
def test_random_load_is_exact(num_modules: int, seeds: int) -> None:
    hits = 0
    for seed in range(seeds):
        server = run_random(100 * num_modules + seed, num_modules)
        hits += sum(request.num_cached_tokens for request in server.requests)
    assert hits > 0


def test_random_load_reaches_the_hard_cases() -> None:
    """The runs preempt, stop, reach limits and reuse pages in part."""
    copies = preemptions = 0
    reasons: set[FinishReason | None] = set()
    for seed in range(30):
        server = run_random(seed, num_modules=2, page_size=4)
        preemptions += server.scheduler.num_preemptions
        reasons |= {request.finish_reason for request in server.requests}
        copies += server.device.num_copies
    assert preemptions > 20 and copies > 20
    assert reasons == {"stop", "length", "abort"}


def find_modules_by_plain_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (manager, prefix):
        monkeypatch.setattr(module, "page_key", lambda group, keys, index, n: keys.target(index))


def publish_one_module_position_early(monkeypatch: pytest.MonkeyPatch) -> None:
    publish, page_key = CacheManager.publish, prefix.page_key

    def key(group: CacheGroup, keys: PrefixKeys, index: int, n: int) -> PageKey:
        if group.owner == "target":
            return page_key(group, keys, index, n)
        return PageKey(keys.prefix(index), keys.lookahead(index, n))

    for module in (manager, prefix):
        monkeypatch.setattr(module, "page_key", key)
    early = lambda *args: publish(*args[:3], args[3] + 1, *args[4:])  # noqa: E731
    monkeypatch.setattr(CacheManager, "publish", early)


def share_the_copy_source(monkeypatch: pytest.MonkeyPatch) -> None:
    def copy(cache: CacheManager, tables: PageTables, sources: dict[int, int]) -> tuple[()]:
        for group, source in sources.items():
            cache.pools[group].acquire(source)
            tables.groups[group].pages.append(source)
        return ()

    monkeypatch.setattr(CacheManager, "_copy_partial_page", copy)


def retire_what_modules_rewrite(monkeypatch: pytest.MonkeyPatch) -> None:
    def reach(group: CacheGroup, num_modules: int) -> int | None:
        return None if group.window is None else group.window - 1

    monkeypatch.setattr(CacheGroup, "reach", reach)


def restart_after_the_module_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    def restart(search: PrefixSearch, target_pages: int, exact: int) -> int:
        return min(target_pages * search.keys.page_size, len(search.keys.tokens) - 1)

    monkeypatch.setattr(PrefixSearch, "_restart", restart)


def sample_before_the_result_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    part = Scheduler._part

    def ignoring(scheduler: Scheduler, request: Request, plan: Any) -> Any:
        awaits, request.awaits_result = request.awaits_result, False
        found = part(scheduler, request, plan)
        request.awaits_result = awaits
        return found

    monkeypatch.setattr(Scheduler, "_part", ignoring)


def run_modules_that_are_too_far_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Request, "behind", lambda request, num_drafts: 0)


def publish_what_left_out_modules_lack(monkeypatch: pytest.MonkeyPatch) -> None:
    publish = CacheManager.publish
    monkeypatch.setattr(
        CacheManager,
        "publish",
        lambda cache, tables, computed, exact, depth: publish(
            cache, tables, computed, len(tables.keys.tokens) - cache.num_modules, depth
        ),
    )


def publish_lost_modules_as_if_they_had_run(monkeypatch: pytest.MonkeyPatch) -> None:
    publish = CacheManager.publish
    monkeypatch.setattr(CacheManager, "publish", lambda *args: publish(*args[:4]))


def lose_no_module_but_publish_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that is left out comes back and writes pages that were published without it."""

    def lose(request: Request, behind: int) -> None:
        request.exact = max(request.exact, request.computed - len(request.left))

    monkeypatch.setattr(Request, "_lose_modules", lose)
    publish = CacheManager.publish
    monkeypatch.setattr(CacheManager, "publish", lambda *args: publish(*args[:4], 1))


def find_pages_of_any_depth(monkeypatch: pytest.MonkeyPatch) -> None:
    lookup, candidates = PagePool.lookup, PagePool.candidates
    monkeypatch.setattr(PagePool, "lookup", lambda pool, key, depth=0: lookup(pool, key))
    monkeypatch.setattr(
        PagePool, "candidates", lambda pool, prefix, depth=0: candidates(pool, prefix)
    )


def reserve_for_known_positions_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Request, "max_computed", property(lambda request: request.computed))


@pytest.mark.parametrize(
    "break_rule",
    [
        find_modules_by_plain_keys,
        publish_one_module_position_early,
        share_the_copy_source,
        retire_what_modules_rewrite,
        restart_after_the_module_hit,
        sample_before_the_result_is_read,
        reserve_for_known_positions_only,
        run_modules_that_are_too_far_behind,
        publish_what_left_out_modules_lack,
        publish_lost_modules_as_if_they_had_run,
        lose_no_module_but_publish_the_others,
        find_pages_of_any_depth,
    ],
)
def test_the_simulation_notices_a_broken_rule(
    break_rule: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    break_rule(monkeypatch)
    with pytest.raises((AssertionError, ValueError, IndexError)):
        for seed in range(30):
            run_random(seed)


class ServerMachine(RuleBasedStateMachine):
    """Any order of arrivals, steps, reads and aborts."""

    @initialize(
        num_modules=st.integers(0, 5),
        page_size=st.sampled_from([1, 2, 4, 8]),
        spare_pages=st.sampled_from([0, 3, 40]),
        windows=st.sampled_from([(None,), (None, 4)]),
        budget=st.integers(6, 20),
        ahead=st.sampled_from([0, 5, 64]),
        behind=st.sampled_from([None, 5, 9]),
        seed=st.integers(0, 1000),
    )
    def start(
        self,
        num_modules: int,
        page_size: int,
        spare_pages: int,
        windows: tuple[int | None, ...],
        budget: int,
        ahead: int,
        behind: int | None,
        seed: int,
    ) -> None:
        adaptive = behind is not None and num_modules > 0
        pages = -(-MAX_MODEL_LEN // page_size) + spare_pages
        self.server = Server(
            make_cache(num_modules, page_size, pages, windows, behind=behind if adaptive else None),
            rng=random.Random(seed),
            adaptive=adaptive,
            max_num_batched_tokens=budget,
            vary=seed % 2 == 0,
            stop_every=12,
            awaiting=seed % 3 / 2,
            ahead=ahead,
        )

    @rule(
        source=st.integers(0, 20),
        shared=st.integers(0, MAX_MODEL_LEN - 4),
        new=st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=3),
        max_tokens=st.integers(1, 15),
    )
    def add(self, source: int, shared: int, new: list[int], max_tokens: int) -> None:
        requests = self.server.requests
        prefix = requests[source % len(requests)].tokens[:shared] if requests else []
        self.server.add(prefix + new, max_tokens)

    @rule(count=st.integers(1, 6))
    def advance(self, count: int) -> None:
        for _ in range(count):
            self.server.advance()

    @precondition(lambda self: self.server.unread)
    @rule()
    def read(self) -> None:
        self.server.read()

    @precondition(lambda self: self.server.requests)
    @rule(which=st.integers(0, 20))
    def abort(self, which: int) -> None:
        requests = self.server.requests
        request = requests[which % len(requests)]
        known = request.status is not RequestStatus.FINISHED
        assert (self.server.scheduler.abort(request.request_id) is request) == known
        self.server.check()

    @rule()
    def reset_prefix_cache(self) -> None:
        self.server.cache.reset_prefix_cache()
        self.server.check()

    def teardown(self) -> None:
        if hasattr(self, "server"):
            self.server.drain()


TestServerMachine = ServerMachine.TestCase
TestServerMachine.settings = settings(max_examples=20, stateful_step_count=25, deadline=None)


@pytest.mark.slow
class TestServerMachineForLong(TestServerMachine):
    settings = settings(max_examples=200, stateful_step_count=25, deadline=None)


def tokens_of_step(step: ScheduledStep | None) -> list[tuple[str, int]]:
    assert step is not None
    return [(row.request.request_id, row.num_rows) for row in step.requests]


def test_decodes_come_first_and_the_rest_of_the_budget_goes_to_chunks() -> None:
    server = Server(make_cache(3, 4, 40), rng=random.Random(0), max_num_batched_tokens=10)
    server.add([0] * 4, 20)
    server.advance()
    server.add([1] * 14, 5)
    server.add([2] * 2, 5)
    assert tokens_of_step(server.dispatch()) == [("0", 4), ("1", 6)]
    step = server.dispatch()
    assert tokens_of_step(step) == [("0", 4), ("1", 6)]
    assert step is not None and [row.samples for row in step.requests] == [True, False]
    # The last chunk has 2 rows but costs 3. That leaves 3 for the next request.
    step = server.dispatch()
    assert tokens_of_step(step) == [("0", 4), ("1", 2), ("2", 2)]
    assert step is not None and [row.samples for row in step.requests] == [True, True, True]
    server.drain()


def test_a_row_costs_at_least_the_rows_of_the_modules() -> None:
    server = Server(
        make_cache(5, 4, 40), rng=random.Random(0), max_num_batched_tokens=16, max_chunk=1
    )
    for _ in range(4):
        server.add([0, 1, 2], 2)
    step = server.dispatch()
    assert tokens_of_step(step) == [("0", 1), ("1", 1), ("2", 1)]
    assert step is not None and step.bucket.num_rows == 16
    server.drain()


def test_the_head_of_the_queue_is_never_overtaken() -> None:
    server = Server(make_cache(0, 4, 8), rng=random.Random(0), max_num_batched_tokens=32)
    server.add([0] * 16, 8)
    assert tokens_of_step(server.dispatch()) == [("0", 16)]
    server.add([1] * 20, 8)  # needs 5 pages; 4 are left
    server.add([2], 1)  # would fit
    assert tokens_of_step(server.dispatch()) == [("0", 1)]
    server.drain()


def test_a_request_decodes_before_its_last_chunk_is_read_but_not_beyond_its_limit() -> None:
    server = Server(make_cache(2, 4, 40), rng=random.Random(0), depth=9)
    one = server.add([0, 1], 1)
    two = server.add([1, 1], 3)
    assert tokens_of_step(server.dispatch()) == [("0", 2), ("1", 2)]
    assert tokens_of_step(server.dispatch()) == [("1", 2)]  # at most two tokens are missing
    assert tokens_of_step(server.dispatch()) == [("1", 1)]
    assert server.dispatch() is None
    assert (one.length, two.length, two.min_length, two.max_computed) == (2, 2, 5, 5)
    server.drain()
    assert (one.finish_reason, two.finish_reason) == ("length", "length")


def test_a_request_that_awaits_results_prefills_ahead_and_then_waits() -> None:
    server = Server(
        make_cache(2, 4, 40), rng=random.Random(0), depth=9, max_num_batched_tokens=6, awaiting=1.0
    )
    request = server.add([0] * 10, 9)
    assert tokens_of_step(server.dispatch()) == [("0", 6)]
    assert tokens_of_step(server.dispatch()) == [("0", 4)]  # samples; the chunk before need not
    assert server.dispatch() is None
    server.read()
    assert server.dispatch() is None
    other = server.add([1, 1], 3)
    other.awaits_result = False
    assert tokens_of_step(server.dispatch()) == [("1", 2)]
    assert tokens_of_step(server.dispatch()) == [("1", 2)]
    server.read()
    assert request.length == 11
    assert tokens_of_step(server.dispatch()) == [("0", 3), ("1", 1)]
    server.drain()


def test_preemption_takes_the_latest_request_and_keeps_its_output() -> None:
    server = Server(make_cache(1, 4, 8, prefix_caching=False), rng=random.Random(0))
    old = server.add([0] * 11, 12)
    new = server.add([1] * 4, 12)
    while server.scheduler.num_preemptions == 0:
        server.advance()
        kept = new.output_ids
    assert old.status is RequestStatus.RUNNING
    assert new.status is RequestStatus.WAITING and new.incarnation == 1
    assert new.slot == -1 and new.computed == 0 and not new.in_flight
    assert server.scheduler.waiting[0] is new
    while server.unread:
        server.read()
    assert new.output_ids == kept, "output of a preempted incarnation was kept"
    server.drain()
    assert new.output_ids[: len(kept)] == kept and len(new.output_ids) == 12


def handing_out(server: Server, steps: int) -> list[int]:
    """Which of the next steps come with new pages."""
    found = []
    for number in range(steps):
        step = server.dispatch()
        assert step is not None
        if any(row.entries for row in step.requests):
            found.append(number)
        server.read()
    return found


@pytest.mark.parametrize(("num_modules", "every"), [(0, 8), (1, 4)])
def test_pages_ahead_come_in_the_same_step_for_all(num_modules: int, every: int) -> None:
    server = Server(make_cache(num_modules, 2, 200), rng=random.Random(0), ahead=8)
    server.device.acceptance = 1.0
    for length in (1, 2, 3):
        server.add([0] * length, 29)
    assert handing_out(server, 12) == [*range(0, 12, every)]
    server.drain()


def test_no_pages_ahead_once_they_are_scarce() -> None:
    """Three requests of 16 pages each, of which 24 are few."""
    taken = {}
    for ahead in (0, 8):
        server = Server(make_cache(0, 2, 24), rng=random.Random(0), ahead=ahead)
        for length in (4, 4, 4):
            server.add([0] * length, 28)
        preempted = []
        while server.scheduler.has_requests:
            server.advance()
            preempted.append(server.scheduler.num_preemptions)
        server.drain()
        taken[ahead] = preempted
    assert taken[0] == taken[8] and max(taken[0]) > 0


def test_a_decoding_request_is_scheduled_as_before_while_nothing_changes() -> None:
    server = Server(make_cache(0, 2, 200), rng=random.Random(0), ahead=8)
    server.add([0, 1], 20)
    steps = [server.dispatch() for _ in range(6)]
    rows = [step.requests[0] for step in steps if step is not None]
    assert rows[0].entries and not rows[1].entries and rows[1] is not rows[0]
    assert all(row is rows[2] for row in rows[3:])
    server.drain()


def test_output_of_an_ended_request_in_flight_is_dropped() -> None:
    server = Server(make_cache(2, 4, 40), rng=random.Random(0), depth=5)
    request = server.add([0, 1, 2], 20)
    server.dispatch()
    server.dispatch()
    server.read()
    length = request.length
    assert server.scheduler.finish(request.request_id, "stop") is request
    assert server.scheduler.finish(request.request_id, "stop") is None
    server.read()
    assert request.length == length == 4 and request.finish_reason == "stop"
    assert not server.scheduler.has_requests
    assert all(pool.num_referenced == 0 for pool in server.cache.pools)


def test_abort_of_waiting_running_and_unknown_requests() -> None:
    server = Server(make_cache(2, 4, 40), rng=random.Random(0), max_num_seqs=1)
    running, waiting = server.add([0], 5), server.add([1], 5)
    server.advance()
    assert server.scheduler.abort("unknown") is None
    for request in (waiting, running):
        assert server.scheduler.abort(request.request_id) is request
        assert request.finish_reason == "abort" and request.slot == -1
    assert not server.scheduler.has_requests
    server.drain()


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("windows", [(None,), (3,), (None, 5)])
def test_a_pool_of_exactly_one_request_serves_them_all(
    windows: tuple[int | None, ...], depth: int
) -> None:
    for page_size in (1, 4):
        server = Server(
            make_cache(3, page_size, MAX_MODEL_LEN // page_size, windows),
            rng=random.Random(7),
            depth=depth,
        )
        for length in (20, 31, 1, 28, 20):
            server.add([length % VOCABULARY] * length, 20)
        server.drain()
        assert server.scheduler.num_preemptions > 0 or depth == 0


def test_a_repeated_prompt_is_reused_but_for_its_last_tokens() -> None:
    for num_modules, expected in ((0, 15), (3, 13)):
        server = Server(make_cache(num_modules, 4, 40), rng=random.Random(0), depth=0)
        prompt = [0, 1, 2, 2] * 4
        server.add(prompt, 4)
        server.drain()
        again = server.add(prompt, 1)
        server.drain()
        assert again.num_cached_tokens == expected


@pytest.mark.parametrize(
    ("num_pages", "kwargs", "message"),
    [
        (7, {}, r"num_pages must be >= 9 for one .* max_model_len=32, got 8 in the .*target/None"),
        (8, {"max_num_batched_tokens": 3}, r"max_num_batched_tokens \(3\) must exceed"),
        (8, {"max_num_seqs": 0}, r"max_num_seqs must be >= 1, got 0"),
        (8, {"max_chunk": 0}, r"max_chunk must be >= 1 or None, got 0"),
    ],
)
def test_impossible_configurations_are_refused(
    num_pages: int, kwargs: dict[str, int], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        Server(make_cache(3, 4, num_pages), rng=random.Random(0), **kwargs)


def test_buckets_must_cover_the_budget() -> None:
    small, large, shallow = (Bucket(*one, 1, 8, 9) for one in ((3, 8), (3, 16), (2, 32)))
    with pytest.raises(ConfigError, match=r"buckets \[\(3, 8\), \(3, 16\)\] must ascend"):
        SchedulerConfig(1, 17, 32, 3, (small, large))
    with pytest.raises(ConfigError, match=r"buckets \[\(3, 16\), \(3, 8\)\] must ascend"):
        SchedulerConfig(1, 8, 32, 3, (large, small))
    with pytest.raises(ConfigError, match=r"buckets \[\(2, 32\)\] must ascend"):
        SchedulerConfig(1, 17, 32, 3, (shallow,))


def test_windowed_pools_may_be_smaller_than_a_request() -> None:
    cache = make_cache(2, 4, 5, windows=(3,))
    assert [g.pages_for_one_request(1, 1000, 3) for g in cache.groups] == [4, 5]
    for seed in range(10):
        server = Server(
            make_cache(2, 4, 5, windows=(3,)), rng=random.Random(seed), max_num_batched_tokens=3
        )
        for length in (20, 28, 7):
            server.add([0] * length, 9)
        server.drain()


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "message"),
    [
        ([], 1, "at least 1 token"),
        ([0] * 32, 1, "prompt has 32 tokens, but max_model_len=32 leaves room for at most 31"),
        ([0], 0, "max_tokens must be >= 1, got 0"),
    ],
)
def test_requests_that_cannot_run_are_refused(
    prompt: list[int], max_tokens: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Request.create("a", prompt, max_tokens, MAX_MODEL_LEN)


def test_add_refuses_a_known_id_and_a_limit_beyond_the_model() -> None:
    server = Server(make_cache(0, 4, 8), rng=random.Random(0))
    server.add([0], 1)
    with pytest.raises(ValueError, match="request_id '0' is already in use"):
        server.scheduler.add(Request.create("0", [0], 1, MAX_MODEL_LEN))
    with pytest.raises(ValueError, match="does not fit max_model_len=32"):
        server.scheduler.add(Request.create("1", [0], None, MAX_MODEL_LEN + 1))


def test_prompts_beside_requests_that_decode_take_a_few_steps() -> None:
    """In the smallest program for that; alone they take as much as a step has."""
    server = Server(
        make_cache(0, 4, 40),
        rng=random.Random(0),
        max_num_batched_tokens=24,
        row_counts=(2, 4, 8, 16, 24),
    )
    server.add([0] * 24, 8)
    assert tokens_of_step(server.dispatch()) == [("0", 24)]
    server.add([1] * 20, 5)
    steps = [server.dispatch() for _ in range(4)]
    assert [step.bucket.num_rows for step in steps if step is not None] == [8, 8, 8, 2]
    assert [tokens_of_step(step)[1] for step in steps] == [("1", 7), ("1", 7), ("1", 6), ("1", 1)]
    server.drain()
