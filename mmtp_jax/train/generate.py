"""Draws responses of the target to prompts and writes them as training data.

The engine is always full: when the last samples of a shard run, those of the next run already.
"""

from __future__ import annotations

import gc
import hashlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from jaxtyping import Int32

from mmtp_jax.config import require
from mmtp_jax.engine.core import EngineCore
from mmtp_jax.engine.delta import TokenDelta
from mmtp_jax.loader import LoadedModel, parameter_dtype
from mmtp_jax.progress import CompileBar, SamplesBar
from mmtp_jax.prompts import Messages
from mmtp_jax.sampling.params import SamplingParams
from mmtp_jax.train.samples import GenerateOptions, SamplePlan
from mmtp_jax.train.shards import Manifest, Shard, shard_path, token_dtype
from mmtp_jax.weights.errors import ModelError

type Prompt = Int32[np.ndarray, " _"]


@dataclass(frozen=True)
class Generated:
    """What a run did: samples and response tokens that it drew, shards that it wrote and found, and
    prompts that were too long."""

    samples: int
    tokens: int
    shards_written: int
    shards_found: int
    prompts_skipped: int


def generate(
    loaded: LoadedModel,
    conversations: Sequence[Messages],
    folder: Path | str,
    options: GenerateOptions,
    *,
    progress: bool = False,
) -> Generated:
    """Answer every conversation as `options` say and write the samples to `folder`.

    A sample holds the prompt's ids, as the chat template has them, and those of the response, with
    the token that ended it unless it was cut at `max_tokens`. Shards that are there already are not
    drawn again: a run that was interrupted goes on where it was. A sample depends on its prompt,
    the options and the model alone (as far as logits do not depend on the batch: README).

    Raises what `draw` raises, `ModelError` for a model without a tokenizer, and
    `ChatTemplateError`.
    """
    return draw(loaded, _encode(loaded, conversations), folder, options, progress=progress)


def draw(
    loaded: LoadedModel,
    encoded: Sequence[Prompt],
    folder: Path | str,
    options: GenerateOptions,
    *,
    progress: bool = False,
) -> Generated:
    """`generate` for prompts of token ids.

    Raises `ConfigError` if `folder` holds data of other settings, or the prompts and `max_tokens`
    do not fit the model.
    """
    context = options.max_prompt_len + options.max_tokens
    require(
        context <= loaded.max_model_len,
        f"max_prompt_len + max_tokens must be <= max_model_len={loaded.max_model_len},"
        f" got {options.max_prompt_len} + {options.max_tokens}",
    )
    prompts = [prompt for prompt in encoded if len(prompt) <= options.max_prompt_len]
    require(
        bool(prompts),
        f"max_prompt_len={options.max_prompt_len} leaves out all {len(encoded)} prompt(s)",
    )
    plan = SamplePlan(len(prompts), options)
    manifest = _manifest(loaded, prompts, plan)
    folder = Path(folder)
    manifest.claim(folder)
    missing = [index for index in range(plan.num_shards) if not shard_path(folder, index).exists()]
    samples = tokens = 0
    if missing:
        with CompileBar(visible=progress) as bar:
            core = EngineCore(
                loaded.config,
                loaded.graph,
                loaded.params,
                max_model_len=context,
                progress=bar.update,
            )
        drawing = _Drawing(core, prompts, plan)
        total = sum(plan.shard(index).size for index in missing)
        with SamplesBar(total, visible=progress) as bar:
            for index, shard in drawing.shards(missing, bar):
                shard.write(shard_path(folder, index))
                bar.shard_written(index, plan.num_shards)
                samples += shard.lengths.size
                tokens += int((shard.lengths - shard.prompt_lengths).sum())
    return Generated(
        samples=samples,
        tokens=tokens,
        shards_written=len(missing),
        shards_found=plan.num_shards - len(missing),
        prompts_skipped=len(encoded) - len(prompts),
    )


def _encode(loaded: LoadedModel, conversations: Sequence[Messages]) -> list[Prompt]:
    """The token ids of every conversation."""
    if loaded.tokenizer is None:
        raise ModelError(f"{loaded.config.model} has no tokenizer, so it cannot answer text")
    chat_ids, vocab_size = loaded.tokenizer.chat_ids, loaded.graph.config.vocab_size
    prompts = [np.array(chat_ids(messages), np.int32) for messages in conversations]
    for number, prompt in enumerate(prompts, start=1):
        require(
            bool(0 < prompt.size and prompt.max() < vocab_size),
            f"prompt {number} must have at least one token, and none of {vocab_size} or above",
        )
    return prompts


def _manifest(loaded: LoadedModel, prompts: Sequence[Prompt], plan: SamplePlan) -> Manifest:
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(prompt.size.to_bytes(4, "little") + prompt.tobytes())
    options = plan.options
    vocab_size = loaded.graph.config.vocab_size
    return Manifest(
        model=loaded.config.model,
        vocab_size=vocab_size,
        settings={
            "prompts": digest.hexdigest()[:16],
            "temperatures": list(options.temperatures),
            "samples": options.samples,
            "max_tokens": options.max_tokens,
            "max_prompt_len": options.max_prompt_len,
            "shard_size": options.shard_size,
            "seed": options.seed,
            "dtype": str(parameter_dtype(loaded.config.dtype)),
        },
        num_samples=plan.num_samples,
        num_shards=plan.num_shards,
        token_dtype=token_dtype(vocab_size),
    )


@dataclass
class _OpenShard:
    """A shard of which some samples are not drawn yet."""

    index: int
    numbers: list[int]
    responses: dict[int, list[int]] = field(default_factory=dict)
    unfinished: int = field(init=False)

    def __post_init__(self) -> None:
        self.unfinished = len(self.numbers)


class _Drawing:
    """Samples on their way through the engine."""

    def __init__(self, core: EngineCore, prompts: Sequence[Prompt], plan: SamplePlan) -> None:
        self._core = core
        self._prompts = prompts
        self._plan = plan
        self._params = {
            temperature: SamplingParams(temperature=temperature, max_tokens=plan.options.max_tokens)
            for temperature in plan.options.temperatures
        }
        # Shard and response of every sample that the engine has, by request id.
        self._open: dict[str, tuple[_OpenShard, list[int]]] = {}

    def shards(self, indices: Sequence[int], bar: SamplesBar) -> Iterator[tuple[int, Shard]]:
        """Draw these shards; each comes as soon as it is complete."""
        shards = (_OpenShard(index, self._plan.shard(index).tolist()) for index in indices)
        samples = ((shard, number) for shard in shards for number in shard.numbers)
        # As many wait as run, so that those that end together are replaced together.
        most = 2 * self._core.config.limits.max_num_seqs
        gc.freeze()  # as for a server: looking for garbage in what was there would hold up steps
        try:
            while True:
                for shard, number in itertools.islice(samples, most - len(self._open)):
                    self._add(shard, number)
                if not self._open:
                    return
                deltas = self._core.step()
                complete = self._take(deltas)
                ended = sum(delta.finish_reason is not None for delta in deltas)
                bar.update(ended, sum(len(delta.token_ids) for delta in deltas))
                for shard in complete:
                    yield shard.index, self._pack(shard)
        finally:
            gc.unfreeze()

    def _add(self, shard: _OpenShard, number: int) -> None:
        plan, request_id = self._plan, str(number)
        prompt = self._prompts[plan.prompt(number)].tolist()
        params = self._params[plan.temperature(number)]
        self._core.add(request_id, prompt, params, plan.seed(number))
        response: list[int] = []
        shard.responses[number] = response
        self._open[request_id] = shard, response

    def _take(self, deltas: Sequence[TokenDelta]) -> list[_OpenShard]:
        """Keep a step's tokens; the shards that they completed."""
        complete = []
        for delta in deltas:
            shard, response = self._open[delta.request_id]
            response += delta.token_ids
            if delta.finish_reason is not None:
                del self._open[delta.request_id]
                shard.unfinished -= 1
                if not shard.unfinished:
                    complete.append(shard)
        return complete

    def _pack(self, shard: _OpenShard) -> Shard:
        plan = self._plan
        return Shard.pack(
            prompts=[self._prompts[plan.prompt(number)] for number in shard.numbers],
            responses=[shard.responses[number] for number in shard.numbers],
            temperatures=[plan.temperature(number) for number in shard.numbers],
            dtype=token_dtype(self._core.graph.config.vocab_size),
        )
