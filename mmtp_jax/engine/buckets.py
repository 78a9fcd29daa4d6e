"""Static shapes of the engine's programs: few enough to compile all of them at start-up."""

from __future__ import annotations

from dataclasses import dataclass

from mmtp_jax.adaptive.costs import Program
from mmtp_jax.config import EngineConfig, require

# Positions beyond those of a step that get pages early, where pages are plenty.
RESERVED_AHEAD = 64


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclass(frozen=True, order=True)
class Bucket:
    """One program: at most D drafts of a request, T rows, B requests, S logit rows, X new
    page-table entries. A request samples at most W = k+1 rows.
    """

    num_drafts: int
    num_rows: int
    num_requests: int
    logit_rows: int
    num_entries: int

    @property
    def program(self) -> Program:
        """What tells it from the others."""
        return Program(self.num_drafts, self.num_rows)


@dataclass(frozen=True)
class Spacing:
    """The fewest rows of a program, and how many times larger the next one is. Between the smallest
    and one of `few` rows there is none, a full decode batch aside. The one that has room for
    prompts beside a full decode batch is `beyond` times as large as that."""

    least: int
    few: int
    factor: int
    beyond: float


CPU_SPACING = Spacing(least=1, few=1, factor=4, beyond=4)
# A step of one row takes longer than one of eight on an H200 (SmolLM2: 0.98 against 0.89 ms): XLA
# computes products of one row without tensor cores. 64 requests take 6 % longer than eight (0.88
# against 0.83 ms), so programs between are few; beyond, compiling is cheaper than rows.
GPU_SPACING = Spacing(least=8, few=32, factor=2, beyond=1.5)


def depths_below(num_drafts: int, spacing: Spacing) -> tuple[int, ...]:
    """Numbers of drafts below the most that have programs of their own, if draft lengths vary:
    none, one, and on by the factor that spaces rows too."""
    depths = [0]
    depth = 1
    while depth < num_drafts:
        depths.append(depth)
        depth *= spacing.factor
    return tuple(depths)


def bucket_sizes(
    max_num_seqs: int,
    max_num_batched_tokens: int,
    width: int,
    row_multiple: int,
    spacing: Spacing = CPU_SPACING,
) -> tuple[int, ...]:
    """Row counts, spaced by a factor: from one decode window of `width` rows to the full decode
    batch (max_num_seqs windows), and on to the budget; all multiples of `row_multiple`.

    A lone request deserves a program of its own: on a CPU 16 rows cost twice as much as one. No
    program is smaller than a window, so each holds a request.
    """

    def rounded(size: int) -> int:
        return round_up(max(size, spacing.least), row_multiple)

    largest = rounded(max_num_batched_tokens)
    decode = min(rounded(max_num_seqs * width), largest)
    sizes = {decode, largest}
    for start, end in ((width, decode), (int(spacing.beyond * decode), largest)):
        size = start
        while rounded(size) < end:
            if size == start or rounded(size) >= spacing.few:
                sizes.add(rounded(size))
            size *= spacing.factor
    return tuple(sorted(sizes))


def buckets(
    config: EngineConfig,
    *,
    num_modules: int,
    width: int,
    num_groups: int,
    lookahead: int = 0,
    ahead: int = 0,
    row_counts: tuple[int, ...] | None = None,
    depths: tuple[int, ...] = (),
    spacing: Spacing = CPU_SPACING,
) -> tuple[Bucket, ...]:
    """Every program of a configuration, ascending; `ConfigError` if one decode window does not fit.

    `lookahead` and `ahead` are those of the scheduler. `row_counts` replaces the sizes that
    `bucket_sizes` chooses (but none is below the least). `depths` are numbers of drafts below W - 1
    that have programs too, the largest for chunks of prompts beside requests that decode.
    """
    seqs, most_rows = config.limits
    require(
        most_rows >= width,
        f"max_num_batched_tokens must be >= {width} (num_speculative_tokens + 1), got {most_rows}",
    )

    def made(depth: int, size: int) -> Bucket:
        program = Program(depth, size)
        # Where all run the same modules, each costs as many rows at least.
        most = program.most_requests if depths else size // max(num_modules, 1)
        requests = min(seqs, most)
        logit_rows = min(size, round_up(requests * width, config.row_multiple))
        # From step to step, a request needs pages for as many more positions as it has rows (and in
        # the first one for `lookahead`), and may get some `ahead`. Both ends can lie within a page.
        page_size = config.cache.page_size
        each = 2 + -(-(lookahead + ahead) // page_size)
        pages = -(-size // page_size) + each * requests
        return Bucket(*program, requests, logit_rows, pages * num_groups)

    found = set()
    for depth in (*depths, width - 1):
        decode = seqs * (depth + 1)
        most = most_rows if depth == width - 1 else min(most_rows, int(spacing.beyond * decode))
        sizes = row_counts or bucket_sizes(seqs, most, depth + 1, config.row_multiple, spacing)
        found |= {made(depth, max(size, spacing.least)) for size in sizes}
    return tuple(sorted(found))
