"""A device in plain Python whose cache entries are symbols for the tokens they were computed from.

The target's entry at position q stands for tokens[:q + 1], module m's for tokens[:q + 2 + m]. Every
read is compared with what the request's own history demands, every write must hit a page that only
this request owns and that is not published. Anything wrong is an AssertionError.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from mmtp_jax.cache.manager import Admission, CacheManager

VOCABULARY = 2
STOP_TOKEN = 2
POISON = -1


class Language:
    """Interned token prefixes (a tree of integers) and the target's next token after each."""

    def __init__(self, stop_every: int | None = None) -> None:
        self.stop_every = stop_every
        self._children: dict[tuple[int, int], int] = {}

    def prefixes(self, tokens: Sequence[int]) -> list[int]:
        """The symbol of tokens[:n] at index n."""
        symbols = [0]
        for token in tokens:
            key = (symbols[-1], token)
            symbols.append(self._children.setdefault(key, len(self._children) + 1))
        return symbols

    def next_token(self, prefix: int) -> int:
        mixed = (prefix * 2654435761 + 12345) >> 5
        if self.stop_every is not None and mixed % self.stop_every == 0:
            return STOP_TOKEN
        return mixed % VOCABULARY

    def continuation(self, tokens: Sequence[int], count: int) -> list[int]:
        """What the target generates after `tokens`, a stop id not ending it."""
        result = list(tokens)
        for _ in range(count):
            result.append(self.next_token(self.prefixes(result)[-1]))
        return result[len(tokens) :]


@dataclass
class Slot:
    tokens: list[int]
    limit: int
    computed: int
    restart: int
    exact: list[int]
    valid: tuple[int, ...]
    tables: list[list[int]]
    ran: tuple[int, int, int]  # computed positions, tokens, and how many modules ran there
    drafts: list[int] = field(default_factory=list)
    stopped: bool = False


class SymbolicDevice:
    """Executes admissions and rows at once, in the order in which they are dispatched."""

    def __init__(self, cache: CacheManager, language: Language, rng: random.Random) -> None:
        self.cache = cache
        self.language = language
        self.rng = rng
        self.acceptance = rng.choice([0.0, 0.5, 0.8, 1.0])
        self.slots: dict[int, Slot] = {}
        self._modules = cache.num_modules
        self._page_size = cache.page_size
        # contents[group][page][offset]: a symbol, or one symbol per module
        empty = (POISON,) * max(self._modules, 1)
        self._contents = [
            [[empty] * self._page_size for _ in range(group.num_pages)] for group in cache.groups
        ]
        self._empty = empty
        self.num_copies = 0
        self.most_rows = 0  # of the latest step, the target's or the modules'
        self._snapshots: dict[tuple[int, int], tuple[object, object]] = {}

    def admit(
        self, slot: int, tokens: Sequence[int], limit: int, depth: int, admission: Admission
    ) -> None:
        for copy in admission.copies:
            assert copy.source != copy.destination
            self.num_copies += 1
            pages = self._contents[copy.group]
            pages[copy.destination] = list(pages[copy.source])
        state = Slot(
            tokens=list(tokens),
            limit=limit,
            computed=admission.computed,
            restart=admission.computed,
            exact=[admission.exact] * self._modules,
            valid=admission.valid,
            tables=[list(row) for row in admission.rows],
            ran=(admission.computed, len(tokens), 0),
        )
        self.slots[slot] = state
        assert 0 <= admission.computed < len(tokens)
        if depth:
            assert admission.computed <= admission.exact
        symbols = self.language.prefixes(tokens)
        for g, valid in enumerate(state.valid):
            assert admission.computed <= valid
            is_target = self.cache.groups[g].owner == "target"
            first = admission.computed if is_target else admission.exact
            self._check_reads(state, g, symbols, min(first, valid), valid, depth)

    def step(
        self,
        slot: int,
        num_rows: int,
        num_drafts: int,
        capacity: int,
        entries: Sequence[Sequence[tuple[int, int]]],
    ) -> tuple[int, ...]:
        """Run one request's rows, and modules for `num_drafts`; the tokens it emits."""
        state = self.slots[slot]
        self.most_rows = 0
        for g, new in enumerate(entries):
            for index, page in new:
                assert index == len(state.tables[g]), "table entries must be appended in order"
                self._assert_writable(g, page)
                state.tables[g].append(page)
                self._contents[g][page] = [self._empty] * self._page_size
        if state.stopped:
            return ()
        computed, length = state.computed, len(state.tokens)
        assert computed < capacity, "a row without a page"
        if length - computed == 1:
            room = min(state.limit - 1 - length, capacity - 1 - computed)
            num_rows = 1 + max(0, min(num_rows - 1, len(state.drafts), room))
        assert computed + num_rows <= capacity
        self._run_target(state, num_rows)
        emitted = self._verify(state, num_rows)
        accepted = max(0, len(emitted) - 1)
        before, known, num_ran = state.ran
        for m in range(num_ran):
            state.exact[m] = max(state.exact[m], min(before, known + accepted - 1 - m))
        state.tokens += emitted
        state.computed = len(state.tokens) - 1 if emitted else computed + num_rows
        history = state.tokens + self._guess(state.tokens)
        state.drafts = history[len(state.tokens) :][:num_drafts] if emitted else []
        window = self._run_modules(state, computed, history, num_drafts)
        self.most_rows = max(num_rows, window)
        state.ran = (state.computed, len(state.tokens), num_drafts)
        return emitted

    def check_published(self) -> None:
        """Published pages never change while they are published."""
        for g, pool in enumerate(self.cache.pools):
            for page in range(1, pool.num_pages):
                key, now = pool.key(page), self._contents[g][page]
                known = self._snapshots.pop((g, page), None)
                if key is None:
                    continue
                if known is not None and known[0] is key:
                    assert known[1] == now, f"published page {page} changed"
                self._snapshots[g, page] = (key, list(now))

    def _guess(self, tokens: Sequence[int]) -> list[int]:
        """N drafts after `tokens`, each right with the device's acceptance rate."""
        history = list(tokens)
        for _ in range(self._modules):
            token = self.language.next_token(self.language.prefixes(history)[-1])
            if self.rng.random() >= self.acceptance:
                token = self.rng.randrange(VOCABULARY)
            history.append(token)
        return history[len(tokens) :]

    def _run_target(self, state: Slot, num_rows: int) -> None:
        symbols = self.language.prefixes(state.tokens + state.drafts)
        end = state.computed + num_rows
        for g, group in enumerate(self.cache.groups):
            if group.owner == "target":
                for q in range(max(state.computed, state.valid[g]), end):
                    self._write(state, g, q, (symbols[q + 1],) * len(self._empty))
                self._check_reads(state, g, symbols, state.computed, end)

    def _verify(self, state: Slot, num_rows: int) -> tuple[int, ...]:
        length = len(state.tokens)
        if state.computed + num_rows < length:
            return ()
        num_drafts = state.computed + num_rows - length
        emitted: list[int] = []
        for position in range(num_drafts + 1):
            prefix = self.language.prefixes(state.tokens + emitted)[-1]
            emitted.append(self.language.next_token(prefix))
            if emitted[-1] == STOP_TOKEN or length + len(emitted) >= state.limit:
                state.stopped = True
                break
            if position == num_drafts or state.drafts[position] != emitted[-1]:
                break
        return tuple(emitted)

    def _run_modules(self, state: Slot, before: int, history: Sequence[int], count: int) -> int:
        """catch_up: the rows at which the entries of the first `count` modules are not exact yet,
        written there; how many."""
        if count == 0:
            return 0
        symbols = self.language.prefixes(history)
        end = state.computed
        start = min(state.exact[:count])
        for q in range(start, end):
            written = [m for m in range(count) if q >= state.exact[m]]
            assert q >= state.restart, "a hidden state from before the restart is needed"
            assert q >= before - self.cache.behind, "a hidden state left the ring"
            for g, group in enumerate(self.cache.groups):
                if group.owner == "modules":
                    entry = list(self._read(state, g, q))
                    for m in written:
                        entry[m] = symbols[q + 2 + m]
                    self._write(state, g, q, tuple(entry))
        for g, group in enumerate(self.cache.groups):
            if group.owner == "modules":
                self._check_reads(state, g, symbols, start, end, count)
        return max(end - start, 0)

    def _check_reads(
        self,
        state: Slot,
        g: int,
        symbols: Sequence[int],
        first: int,
        end: int,
        count: int | None = None,
    ) -> None:
        """What queries from `first` on read below `end`: of the target, or the first modules."""
        group = self.cache.groups[g]
        if group.owner == "modules" and count == 0:
            return
        oldest = 0 if group.window is None else max(0, first - (group.window - 1))
        for q in range(oldest, end):
            entry = self._read(state, g, q)
            if group.owner == "target":
                assert entry[0] == symbols[q + 1], f"{group.name}: wrong entry at {q}"
            else:
                modules = range(self._modules if count is None else count)
                expected = tuple(symbols[q + 2 + m] for m in modules)
                assert entry[: len(modules)] == expected, f"{group.name}: wrong entry at {q}"

    def _read(self, state: Slot, g: int, q: int) -> tuple[int, ...]:
        page = state.tables[g][q // self._page_size]
        assert page != 0, f"{self.cache.groups[g].name}: position {q} is not mapped"
        return self._contents[g][page][q % self._page_size]

    def _write(self, state: Slot, g: int, q: int, entry: tuple[int, ...]) -> None:
        page = state.tables[g][q // self._page_size]
        self._assert_writable(g, page)
        self._contents[g][page][q % self._page_size] = entry

    def _assert_writable(self, g: int, page: int) -> None:
        pool = self.cache.pools[g]
        assert page != 0, "a write to the null page"
        assert pool.key(page) is None, f"a write to published page {page}"
        assert pool.references(page) == 1, f"a write to page {page}, which is free or shared"
