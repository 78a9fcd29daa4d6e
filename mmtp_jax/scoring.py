"""Collects teacher-forced logits from the chunks of a scoring request."""

from __future__ import annotations

import jax
import numpy as np

from mmtp_jax.engine.plan import StepOutput
from mmtp_jax.specs import ModelConfig


class Scorer:
    """Rows of T positions: every chunk fills the rows it computed.

    Row t of module m consumes token t+1+m, so rows t > T-2-m would see drafts and stay NaN.
    """

    def __init__(self, num_tokens: int, config: ModelConfig) -> None:
        self._num_tokens = num_tokens
        self._logits = np.full((num_tokens, config.vocab_size), np.nan, np.float32)
        shape = (config.num_modules, num_tokens, config.vocab_size)
        self._mtp_logits = np.full(shape, np.nan, np.float32)

    def collect(self, output: StepOutput, row: int) -> None:
        """Take the rows of request `row` of a step."""
        collected = jax.device_get(output.collected)
        mine = collected.target_real & (collected.target_request == row)
        self._logits[collected.target_position[mine]] = collected.target_logits[mine]
        mine = collected.mtp_real & (collected.mtp_request == row)
        position = collected.mtp_position[mine]
        for module, logits in enumerate(collected.mtp_logits[:, mine]):
            known = position <= self._num_tokens - 2 - module
            self._mtp_logits[module, position[known]] = logits[known]

    def result(self) -> dict[str, np.ndarray]:
        return {"logits": self._logits, "mtp_logits": self._mtp_logits}
