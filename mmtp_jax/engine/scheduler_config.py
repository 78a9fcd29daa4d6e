"""What a scheduler may put into a step."""

from __future__ import annotations

from dataclasses import dataclass

from mmtp_jax.config import require
from mmtp_jax.engine.buckets import Bucket


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits of a step.

    `buckets`: the programs, ascending; the last takes every step. `max_num_batched_tokens` bounds
    the rows of a step, where a request costs max(rows, d) because d modules run at least d rows.
    `max_chunk` bounds the rows of one prefill chunk. `lookahead`: positions beyond a step's rows
    that its drafts are written at. `ahead`: positions beyond these that get pages early where pages
    are plenty, all requests' in the same step, so that most steps hand out none.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    num_speculative_tokens: int
    buckets: tuple[Bucket, ...]
    max_chunk: int | None = None
    lookahead: int = 0
    ahead: int = 0

    def __post_init__(self) -> None:
        require(self.max_num_seqs >= 1, f"max_num_seqs must be >= 1, got {self.max_num_seqs}")
        require(self.max_model_len >= 2, f"max_model_len must be >= 2, got {self.max_model_len}")
        require(
            self.max_chunk is None or self.max_chunk >= 1,
            f"max_chunk must be >= 1 or None, got {self.max_chunk}",
        )
        require(
            self.max_num_batched_tokens > self.num_speculative_tokens >= 0,
            f"max_num_batched_tokens ({self.max_num_batched_tokens}) must exceed"
            f" num_speculative_tokens ({self.num_speculative_tokens})",
        )
        programs = [bucket.program for bucket in self.buckets]
        require(
            len(programs) > 0
            and programs == sorted(set(programs))
            and self.buckets[-1].num_rows >= self.max_num_batched_tokens
            and self.buckets[-1].num_drafts == self.num_speculative_tokens,
            f"buckets {[tuple(program) for program in programs]} must ascend to"
            f" num_speculative_tokens ({self.num_speculative_tokens}) and at least"
            f" max_num_batched_tokens ({self.max_num_batched_tokens})",
        )

    @property
    def max_rows(self) -> int:
        """The most rows one request gets in a step."""
        chunk = min(self.max_num_batched_tokens, self.max_chunk or self.max_num_batched_tokens)
        return max(chunk, self.num_speculative_tokens + 1)

    @property
    def steps_per_reserve(self) -> int:
        """Steps that `ahead` positions last for; 0 for none."""
        return -(-self.ahead // (self.num_speculative_tokens + 1))
