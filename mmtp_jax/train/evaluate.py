"""How many tokens a verification emits: counted by the engine, and expected from its texts.

The engine answers prompts with speculation on. For the texts it gave, the modules' teacher-forced
drafts (`drafts.py`) say how many tokens each verification has to emit: both figures must agree, or
the engine's caches hold something else than what the modules were trained on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from jaxtyping import Bool

from mmtp_jax.checks import require
from mmtp_jax.engine.stats import Acceptance
from mmtp_jax.llm import LLM
from mmtp_jax.loader import LoadedModel
from mmtp_jax.outputs import RequestOutput
from mmtp_jax.prompts import Messages
from mmtp_jax.sampling.params import SamplingParams, sample_seed
from mmtp_jax.sampling.state import host_row
from mmtp_jax.train.drafts import Drafts, tokens_per_verification, walk
from mmtp_jax.train.options import EvaluateOptions
from mmtp_jax.train.shards import Dataset


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """One set of prompts at one temperature.

    `tokens_per_step` counts verifications of a draft or more. `acceptance` is by position, of the
    drafts verified there; `reached` is of all verifications. `expected_tokens_per_step` is what the
    modules' teacher-forced drafts give for the same texts, with 1, 2, ... N drafts.
    """

    prompts: str
    temperature: float
    num_prompts: int
    num_tokens: int
    tokens_per_step: float
    acceptance: tuple[float, ...]
    reached: tuple[float, ...]
    expected_tokens_per_step: tuple[float, ...]


def evaluate(
    loaded: LoadedModel, sets: Mapping[str, Sequence[Messages]], options: EvaluateOptions
) -> Iterator[Evaluation]:
    """Every set at every temperature; `ConfigError` if the model has no modules or no tokenizer, or
    draft lengths vary."""
    graph = loaded.graph
    require(
        graph.config.mtp is not None and graph.config.mtp.repeats == 1,
        "the model has no module for every draft: name some with --speculative-model",
    )
    require(
        not loaded.config.speculative.adaptive,
        "num_speculative_tokens must be a number, got 'auto': every step has to verify as many",
    )
    require(loaded.tokenizer is not None, "the model has no tokenizer, and prompts are text")
    with LLM.from_loaded(loaded, progress=True) as llm:
        drafts = Drafts(graph)
        for name, prompts in sets.items():
            ids = [llm.tokenizer.chat_ids(prompt) for prompt in prompts[: options.limit]]
            for temperature in options.temperatures:
                params = [
                    SamplingParams(
                        temperature=temperature,
                        max_tokens=options.max_tokens,
                        seed=options.seed + number,
                    )
                    for number in range(len(ids))
                ]
                outputs = llm.generate(ids, params, progress=True)
                yield _evaluation(name, temperature, outputs, params, loaded, drafts)


def _evaluation(
    name: str,
    temperature: float,
    outputs: Sequence[RequestOutput],
    params: Sequence[SamplingParams],
    loaded: LoadedModel,
    drafts: Drafts,
) -> Evaluation:
    real = Acceptance(loaded.graph.config.num_drafts)
    for output in outputs:
        real.add(output.acceptance)
    verified = real.drafted[0]
    return Evaluation(
        prompts=name,
        temperature=temperature,
        num_prompts=len(outputs),
        num_tokens=sum(len(output.token_ids) for output in outputs),
        tokens_per_step=tokens_per_verification(real),
        acceptance=tuple(real.rates),
        reached=tuple(count / verified if verified else 0.0 for count in real.accepted),
        expected_tokens_per_step=_expected(outputs, params, loaded, drafts),
    )


def output_hits(
    drafts: Drafts,
    loaded: LoadedModel,
    outputs: Sequence[RequestOutput],
    params: Sequence[SamplingParams],
) -> Iterator[tuple[int, Bool[np.ndarray, "N L"]]]:
    """Of every output (in any order), its place in `outputs` and whether each module's draft is the
    token at each index of prompt and text. `params` are those that the engine was given, with their
    seeds."""
    config = loaded.graph.config
    texts = [[*output.prompt_token_ids, *output.token_ids] for output in outputs]
    data = Dataset(
        all_tokens=np.concatenate([np.asarray(text, np.uint32) for text in texts]),
        lengths=np.array([len(text) for text in texts], np.int32),
        prompt_lengths=np.array([len(output.prompt_token_ids) for output in outputs], np.int32),
        temperatures=np.array([one.temperature for one in params], np.float32),
        vocab_size=config.vocab_size,
    )
    rows = np.stack(
        [
            host_row(one, sample_seed(one.seed or 0, 0), int(prompt), config.eos_token_ids)
            for one, prompt in zip(params, data.prompt_lengths, strict=True)
        ]
    )
    return drafts.hits(loaded.params, data, range(len(texts)), rows)


def _expected(
    outputs: Sequence[RequestOutput],
    params: Sequence[SamplingParams],
    loaded: LoadedModel,
    drafts: Drafts,
) -> tuple[float, ...]:
    modules = range(1, loaded.graph.config.num_modules + 1)
    by_drafts = [Acceptance(number) for number in modules]
    for place, hits in output_hits(drafts, loaded, outputs, params):
        output = outputs[place]
        stopped = output.finish_reason == "stop"
        for acceptance in by_drafts:
            own = hits[: acceptance.num_drafts]
            walk(own, len(output.prompt_token_ids), stopped=stopped, acceptance=acceptance)
    return tuple(tokens_per_verification(acceptance) for acceptance in by_drafts)
