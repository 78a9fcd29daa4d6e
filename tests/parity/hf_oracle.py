"""transformers as the oracle: it reads a written checkpoint, and the goldens are what it computes.

The released names and layouts are thereby checked too: transformers must find every tensor that it
needs, and nothing that it does not know.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from golden import Checkpoint, Golden, greedy, known_rows, watch_routing, write_checkpoint
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel
from transformers.utils import logging

logging.set_verbosity_error()
logging.disable_progress_bar()

NUM_TOKENS = 28
NUM_PROMPT = 8
NUM_CONTINUED = 20
MIN_GREEDY_GAP = 1e-3  # of the two best logits, relative to the largest
MIN_SELECTION_GAP = 1e-4  # of the last expert that is chosen and the first that is not
MIN_DISTINCT = 10  # among the continued ids: a loop over few of them would show little

Shapes = Mapping[str, tuple[int, ...]]
ModuleRows = Callable[[torch.Tensor], list[torch.Tensor]]  # ids [T] -> [T-1-m, V] of each module


class Unclear(Exception):
    """A choice of a token or an expert is so close that rounding could turn it, or never varies."""


def first_clear(attempt: Callable[[int], Golden]) -> Golden:
    """What `attempt` makes of the first seed that does not raise `Unclear`."""
    for seed in range(1000):
        try:
            return attempt(seed)
        except Unclear:
            continue
    raise RuntimeError("no seed makes every choice clear")


def released_shapes(
    config: Mapping[str, Any], auto: type = AutoModelForCausalLM
) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor that transformers saves for a model with this config.json."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config))
        model = auto.from_config(AutoConfig.from_pretrained(folder))
        model.save_pretrained(folder)
        (path,) = Path(folder).glob("*.safetensors")
        return shapes_in(path)


def shapes_in(path: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes from the header of a safetensors file."""
    data = path.read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return {name: tuple(header[name]["shape"]) for name in sorted(header.keys() - {"__metadata__"})}


def hf_dialect(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json that transformers writes after it has read `config`."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "config.json")
        path.write_text(json.dumps(config))
        AutoConfig.from_pretrained(folder).save_pretrained(folder)
        return json.loads(path.read_text())


def draw(
    shapes: Shapes,
    seed: int,
    scales: Mapping[str, float],
    shifts: Mapping[str, float] | None = None,
) -> dict[str, np.ndarray]:
    """Random float32 tensors: no parameter is left at a value that hides what it does.

    Weights of norms are 1 + 0.2 noise, biases 0.3 noise, matrices noise / sqrt(inputs), or twice
    that where they end a branch of a layer, the embedding 0.1 noise (so small that an epsilon of
    the norms shows), and the head such that the largest logits are around 10. The keys of `scales`
    and `shifts` are patterns: the noise of a tensor whose name matches is multiplied by the scale,
    and the tensor moved by the shift.
    """
    rng = np.random.default_rng(seed)
    tensors = {}
    for name in sorted(shapes):
        tensor = rng.standard_normal(shapes[name])
        if len(shapes[name]) > 1 and "embed_tokens" not in name:
            tensor /= np.sqrt(shapes[name][-1])
        known = {
            r"norm\.weight$": 0.2,
            "bias$": 0.3,
            "embed_tokens": 0.1,
            "lm_head": 3.0,
            r"(o|down)_proj\.weight$": 2.0,
        }
        for pattern, scale in [*known.items(), *scales.items()]:
            tensor *= scale if re.search(pattern, name) else 1.0
        for pattern, shift in [(r"norm\.weight$", 1.0), *(shifts or {}).items()]:
            tensor += shift if re.search(pattern, name) else 0.0
        tensors[name] = tensor.astype(np.float32)
    return tensors


def split(tensors: Mapping[str, np.ndarray], layers: int) -> dict[str, dict[str, Any]]:
    """Two shards, named as in a release: the trunk's `layers` layers, then the modules."""
    shards: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
    for name, tensor in tensors.items():
        match = re.match(r"model\.layers\.(\d+)\.", name)
        shards[match is not None and int(match[1]) >= layers][name] = tensor
    return {f"model-{i + 1:05d}-of-00002.safetensors": shards[i] for i in range(2)}


def load(
    directory: Path, modules: str = "(?!)", auto: type = AutoModelForCausalLM
) -> PreTrainedModel:
    """The trunk in a directory; the names of unused tensors must match the pattern `modules`."""
    model, info = auto.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    unknown = {name for name in info["unexpected_keys"] if not re.match(modules, name)}
    problems = unknown | set(info["missing_keys"]) | set(info["mismatched_keys"])
    if problems:
        raise ValueError(f"transformers reads the checkpoint differently: {sorted(problems)}")
    return model.eval()


def load_modules(model: PreTrainedModel, modules: str) -> MtpModel:
    """The MTP modules in the directory of `model`, whose names match the pattern `modules`."""
    # transformers finds modules by the numbers of the released layers; these are fewer.
    model._keys_to_ignore_on_load_unexpected = [modules]
    return MtpModel.from_pretrained(model).eval()


@torch.no_grad()
def module_rows(mtp: MtpModel, ids: torch.Tensor, hidden: torch.Tensor) -> list[torch.Tensor]:
    """Teacher-forced logits of each module: row t of module m is for token t+1+m of `ids` [L].

    Module 0 is fed `hidden` [R, H], the others the rows of the module before.
    """
    rows, feed, cache = [], hidden[None], MtpCache(config=mtp.config)
    for module in range(mtp.num_mtp_layers):
        known = ids[1 + module : 1 + module + feed.shape[1]]
        positions = 1 + module + torch.arange(len(known))
        feed = mtp.forward_layer(
            module, feed[:, : len(known)], positions[None], cache, input_ids=known[None]
        )
        rows.append(mtp._project_to_logits(feed)[0])
    return rows


@torch.no_grad()
def check_drafts(mtp: MtpModel, ids: torch.Tensor, hidden: torch.Tensor) -> None:
    """Check `module_rows` against the drafts that transformers itself makes after `ids`."""
    positions = torch.arange(1, len(ids))[None]
    cache = MtpCache(config=mtp.config)
    drafts, logits, _ = mtp(ids[None, 1:], hidden[None, :-1], None, positions, cache)
    rows = module_rows(mtp, torch.cat([ids, drafts[0, :-1]]), hidden[:-1])
    torch.testing.assert_close(torch.stack([r[-1] for r in rows]), logits[0], rtol=1e-5, atol=1e-5)


def watch_experts(modules: Iterable[nn.Module]) -> list[set[int]]:
    """For each router among `modules` a set of its experts that shrinks as they are chosen."""

    def watch(router: Any) -> set[int]:
        unused = set(range(router.num_experts))
        router.register_forward_hook(
            lambda _, inputs, output: unused.difference_update(output[2].flatten().tolist())
        )
        return unused

    return [watch(module) for module in modules if hasattr(module, "e_score_correction_bias")]


@torch.no_grad()
def measure(checkpoint: Checkpoint, model: PreTrainedModel, rows: ModuleRows, seed: int) -> Golden:
    """The golden of a checkpoint whose trunk is `model`; raises `Unclear` if a choice is close."""

    def logits_of(ids: np.ndarray) -> np.ndarray:
        return model(torch.as_tensor(ids, dtype=torch.long)[None]).logits[0].numpy()

    rng = np.random.default_rng([seed, 1])  # not the numbers of the weights
    vocab = logits_of(np.zeros(1, np.int32)).shape[-1]
    tokens = rng.integers(0, vocab, NUM_TOKENS).astype(np.int32)
    prompt = rng.integers(0, vocab, NUM_PROMPT).astype(np.int32)
    gaps = watch_routing(model)
    logits = logits_of(tokens)
    modules = [r.numpy() for r in rows(torch.as_tensor(tokens, dtype=torch.long))]
    continuation, gap = greedy(logits_of, prompt, NUM_CONTINUED)
    distinct = len(set(continuation.tolist()))
    if gap < MIN_GREEDY_GAP or distinct < MIN_DISTINCT or min(gaps, default=1) < MIN_SELECTION_GAP:
        raise Unclear
    return Golden(
        **vars(checkpoint),
        tokens=tokens,
        logits=logits,
        module_logits=known_rows(modules or [logits[:0]], NUM_TOKENS)[: len(modules)],
        prompt=prompt,
        continuation=continuation,
    )


def build_trunk(family: str, config: dict[str, Any], scales: Mapping[str, float]) -> Golden:
    """The golden of a random checkpoint without modules, in one file; `scales` as in `draw`."""
    shapes, config_hf = released_shapes(config), hf_dialect(config)

    def attempt(seed: int) -> Golden:
        files = {"model.safetensors": draw(shapes, seed, scales)}
        checkpoint = Checkpoint(family, config, files, False, (), config_hf=config_hf)
        with tempfile.TemporaryDirectory() as folder:
            model = load(write_checkpoint(checkpoint, Path(folder)))
        return measure(checkpoint, model, lambda ids: [], seed)

    return first_clear(attempt)


def build_with_modules(
    family: str, config: dict[str, Any], scales: Mapping[str, float], shifts: Mapping[str, float]
) -> Golden:
    """The golden of a random checkpoint whose modules are the layers behind the trunk's.

    Layout of DeepSeek-V3 and GLM-4.5: indexed shards, the modules alone in the last one.
    """
    layers, count = config["num_hidden_layers"], config["num_nextn_predict_layers"]
    shapes, config_hf = released_shapes(config), hf_dialect(config)
    shapes |= module_shapes(shapes, layers, count)
    modules = rf"model\.layers\.({'|'.join(str(layers + m) for m in range(count))})\."

    def attempt(seed: int) -> Golden:
        tensors = with_copies(draw(shapes, seed, scales, shifts), layers, count)
        files = split(tensors, layers)
        checkpoint = Checkpoint(family, config, files, True, tuple(files), config_hf=config_hf)
        with tempfile.TemporaryDirectory() as folder:
            model = load(write_checkpoint(checkpoint, Path(folder)), modules)
            mtp = load_modules(model, modules)
        gaps = watch_routing(mtp)

        def rows(ids: torch.Tensor) -> list[torch.Tensor]:
            unused = watch_experts([*model.modules(), *mtp.modules()])
            hidden = model.model(ids[None]).last_hidden_state[0]
            logits = module_rows(mtp, ids, hidden)
            if min(gaps) < MIN_SELECTION_GAP or any(map(len, unused)):
                raise Unclear
            check_drafts(mtp, ids, hidden)
            return logits

        return measure(checkpoint, model, rows, seed)

    return first_clear(attempt)


def module_shapes(trunk: Shapes, layers: int, count: int) -> dict[str, tuple[int, ...]]:
    """The shapes of modules that are a layer like the trunk's last one, behind the trunk's.

    The names are those of DeepSeek-V3 (and GLM-4.5), without the copies of embedding and head.
    """
    hidden = trunk["model.norm.weight"][0]
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in range(layers, layers + count):
        name = f"model.layers.{layer}."
        last = f"model.layers.{layers - 1}."
        shapes |= {name + key.removeprefix(last): trunk[key] for key in trunk if last in key}
        shapes |= dict.fromkeys(
            [f"{name}{norm}.weight" for norm in ("enorm", "hnorm", "shared_head.norm")], (hidden,)
        )
        shapes[f"{name}eh_proj.weight"] = (hidden, 2 * hidden)
    return shapes


def with_copies(
    tensors: Mapping[str, np.ndarray], layers: int, count: int
) -> dict[str, np.ndarray]:
    """`tensors` and, as released, a copy of the embedding and of the head in every module."""
    copies = {}
    for layer in range(layers, layers + count):
        copies[f"model.layers.{layer}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"]
        copies[f"model.layers.{layer}.shared_head.head.weight"] = tensors["lm_head.weight"]
    return dict(tensors) | copies
