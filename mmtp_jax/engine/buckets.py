"""Static shapes of the engine's programs: few enough to compile all of them at start-up."""

from __future__ import annotations

from dataclasses import dataclass

from mmtp_jax.config import EngineConfig, require

# Positions beyond those of a step that get pages early, where pages are plenty.
RESERVED_AHEAD = 64


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class Bucket:
    """One program: T rows, B requests, S logit rows, X new page-table entries.

    A request costs at least max(1, N) rows, which bounds B; it samples at most W = k+1 rows.
    """

    num_rows: int
    num_requests: int
    logit_rows: int
    num_entries: int


@dataclass(frozen=True)
class Spacing:
    """The fewest rows of a program, and how many times larger the next one is."""

    least: int
    factor: int


CPU_SPACING = Spacing(least=1, factor=4)
# A step of one row takes longer than one of eight on an H200 (SmolLM2: 0.98 against 0.89 ms): XLA
# computes products of one row without tensor cores. Compiling is cheap there, rows are not.
GPU_SPACING = Spacing(least=8, factor=2)


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
    for start, end in ((width, decode), (spacing.factor * decode, largest)):
        size = start
        while rounded(size) < end:
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
    spacing: Spacing = CPU_SPACING,
) -> tuple[Bucket, ...]:
    """Every program of a configuration; `ConfigError` if one decode window does not fit.

    `lookahead` and `ahead` are those of the scheduler. `row_counts` replaces the sizes that
    `bucket_sizes` chooses (but none is below the least).
    """
    require(
        config.max_num_batched_tokens >= width,
        f"max_num_batched_tokens must be >= {width} (num_speculative_tokens + 1),"
        f" got {config.max_num_batched_tokens}",
    )
    sizes = row_counts or bucket_sizes(
        config.max_num_seqs, config.max_num_batched_tokens, width, config.row_multiple, spacing
    )
    made = []
    for size in sorted({max(size, spacing.least) for size in sizes}):
        requests = min(config.max_num_seqs, size // max(num_modules, 1))
        logit_rows = min(size, round_up(requests * width, config.row_multiple))
        # From step to step, a request needs pages for as many more positions as it has rows (and in
        # the first one for `lookahead`), and may get some `ahead`. Both ends can lie within a page.
        page_size = config.cache.page_size
        each = 2 + -(-(lookahead + ahead) // page_size)
        pages = -(-size // page_size) + each * requests
        made.append(Bucket(size, requests, logit_rows, pages * num_groups))
    return tuple(made)
