"""Goldens: a tiny checkpoint in a released layout and the values an oracle computed from it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save_file
from torch import nn

INDEX_NAME = "model.safetensors.index.json"


@dataclass
class Checkpoint:
    """A checkpoint as it is released.

    family: name of the directory. config: config.json in the released dialect. files: tensors by
    name for every safetensors file. index: whether to write an index, over the files `indexed`.
    config_hf: the same model as transformers saves its config.
    """

    family: str
    config: dict[str, Any]
    files: dict[str, dict[str, np.ndarray | torch.Tensor]]
    index: bool
    indexed: tuple[str, ...]
    config_hf: dict[str, Any] | None = field(default=None, kw_only=True)


@dataclass
class Golden(Checkpoint):
    """One directory of goldens: a checkpoint and what an oracle computed from it.

    tokens: [T] int32, the scored ids. logits: [T, V] float32 of the trunk. module_logits:
    [N, T, V] float32; row t of module m consumed token t+1+m, rows t > T-2-m are NaN.
    prompt, continuation: int32, the trunk's greedy ids. extra: further arrays of golden.npz.
    """

    tokens: np.ndarray
    logits: np.ndarray
    module_logits: np.ndarray
    prompt: np.ndarray
    continuation: np.ndarray
    extra: dict[str, np.ndarray] = field(default_factory=dict, kw_only=True)


def write_checkpoint(checkpoint: Checkpoint, root: Path) -> Path:
    """Write `checkpoint` to the directory `root`/family, replacing what is there; return it."""
    directory = root / checkpoint.family
    directory.mkdir(parents=True, exist_ok=True)
    for old in directory.iterdir():
        old.unlink()
    _write_json(directory / "config.json", checkpoint.config)
    if checkpoint.config_hf is not None:
        _write_json(directory / "config_hf.json", checkpoint.config_hf)
    sizes: dict[str, int] = {}
    weight_map: dict[str, str] = {}
    for name, tensors in checkpoint.files.items():
        arrays = {key: _array(tensors[key]) for key in sorted(tensors)}
        save_file(arrays, directory / name, metadata={"format": "pt"})
        if name in checkpoint.indexed:
            weight_map |= dict.fromkeys(arrays, name)
            sizes |= {key: array.nbytes for key, array in arrays.items()}
    if checkpoint.index:
        index = {
            "metadata": {"total_size": sum(sizes.values())},
            "weight_map": dict(sorted(weight_map.items())),
        }
        _write_json(directory / INDEX_NAME, index)
    return directory


def write(golden: Golden, root: Path) -> Path:
    """Write `golden` to the directory `root`/family, replacing what is there; return it."""
    directory = write_checkpoint(golden, root)
    np.savez(
        directory / "golden.npz",
        tokens=golden.tokens.astype(np.int32),
        logits=golden.logits.astype(np.float32),
        module_logits=golden.module_logits.astype(np.float32),
        prompt=golden.prompt.astype(np.int32),
        continuation=golden.continuation.astype(np.int32),
        **golden.extra,
    )
    return directory


def greedy(
    logits_of: Callable[[np.ndarray], np.ndarray], prompt: np.ndarray, count: int
) -> tuple[np.ndarray, float]:
    """`count` greedy ids after `prompt`, and the smallest gap of the two best logits on the way.

    `logits_of` maps ids [T] to logits [T, V]. The gap is relative to the row's max |logit|.
    """
    ids, gap = prompt, np.inf
    for _ in range(count):
        row = logits_of(ids)[-1]
        second, best = np.sort(row)[-2:]
        gap = min(gap, (best - second) / np.abs(row).max())
        ids = np.append(ids, row.argmax().astype(ids.dtype))
    return ids[len(prompt) :], float(gap)


def watch_routing(model: nn.Module) -> list[float]:
    """A list that grows at every call of a router of `model`: how clear its choices are.

    An entry is the smallest difference of the k-th and (k+1)-th best sigmoid score plus bias, or of
    the last kept and the first dropped group (scored by its two best). The router has `weight`
    [E + shared, H], `e_score_correction_bias` [E], `top_k` and perhaps `num_group`, `topk_group`.
    """
    gaps: list[float] = []

    def record(router: nn.Module, inputs: tuple[torch.Tensor, ...], _: object) -> None:
        hidden = inputs[0].reshape(-1, inputs[0].shape[-1])
        bias = router.e_score_correction_bias
        scores = (hidden @ router.weight.T).sigmoid()[:, : len(bias)] + bias
        if getattr(router, "num_group", 1) > 1:
            groups = scores.unflatten(-1, (router.num_group, -1))
            best = groups.topk(2).values.sum(-1)
            gaps.append(_selection_gap(best, router.topk_group))
            kept = best >= best.topk(router.topk_group).values[:, -1:]
            scores = groups.masked_fill(~kept[..., None], -torch.inf).flatten(-2)
        gaps.append(_selection_gap(scores, router.top_k))

    for module in model.modules():
        if hasattr(module, "e_score_correction_bias"):
            module.register_forward_hook(record)
    return gaps


def _selection_gap(scores: torch.Tensor, k: int) -> float:
    """Smallest difference of the k-th and (k+1)-th best of `scores` [..., E] over all rows."""
    best = scores.sort(dim=-1, descending=True).values
    return float((best[..., k - 1] - best[..., k]).min())


def known_rows(rows: list[np.ndarray], length: int) -> np.ndarray:
    """Logits of every module, [T-1-m, V] each, as one array [N, T, V] with NaN where unknown."""
    result = np.full((len(rows), length, rows[0].shape[-1]), np.nan, np.float32)
    for module, logits in enumerate(rows):
        result[module, : len(logits)] = logits
    return result


def _array(tensor: np.ndarray | torch.Tensor) -> np.ndarray:
    if isinstance(tensor, torch.Tensor):
        tensor = tensor.detach().numpy()
    return np.ascontiguousarray(tensor)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
