"""Where a training keeps what it needs to go on: its settings, its state and its log.

A folder belongs to one training. The state is saved by Orbax, whole or not at all; a training that
starts again in the folder goes on from the last state, and forgets what was logged after it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from mmtp_jax.checks import ConfigError, require
from mmtp_jax.train.step import TrainState
from mmtp_jax.weights.errors import ModelError

_KEPT = 2


class Saves:
    """The folder of a training with these settings.

    Raises `ConfigError` naming what differs if the folder is another training's, and if it cannot
    be written.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self._log = folder / "log.jsonl"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._claim(folder / "settings.json", json.loads(json.dumps(dict(settings))))
            options = ocp.CheckpointManagerOptions(max_to_keep=_KEPT)
            self._manager = ocp.CheckpointManager(folder.resolve() / "states", options=options)
        except OSError as error:
            raise ConfigError(f"cannot train in {folder}: {error}") from None

    @staticmethod
    def _claim(path: Path, settings: dict[str, Any]) -> None:
        if not path.exists():
            path.write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")
            return
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            require(isinstance(found, dict), "it must be a JSON object")
        except ValueError as error:
            raise ModelError(f"{path} is damaged: {error}") from None
        for name in sorted(found.keys() | settings.keys()):
            require(
                found.get(name) == settings.get(name),
                f"{path.parent} holds a training with other settings: {name} is"
                f" {found.get(name)!r} there and {settings.get(name)!r} here",
            )

    def latest(self, state: TrainState) -> TrainState:
        """The last state that was saved, placed as `state` is; `state` itself if there is none.

        Raises `ModelError` if what was saved is damaged.
        """
        step = self._manager.latest_step()
        if step is None:
            self._log.unlink(missing_ok=True)
            return state
        try:
            abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
            restored = self._manager.restore(step, args=ocp.args.StandardRestore(abstract))
        except Exception as error:
            # Orbax and TensorStore raise many kinds of errors for files that are not whole.
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise ModelError(f"the state of step {step} is damaged: {reason}") from error
        self._forget_after(step)
        found: TrainState = restored
        return found

    def save(self, state: TrainState) -> None:
        """Keep a state; the oldest ones go."""
        self._manager.save(int(state.step), args=ocp.args.StandardSave(state))
        self._manager.wait_until_finished()

    def log(self, entry: Mapping[str, Any]) -> None:
        """Append a line of JSON, which must have a "step"."""
        with self._log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")

    def close(self) -> None:
        self._manager.close()

    def _forget_after(self, step: int) -> None:
        if not self._log.exists():
            return
        lines = self._log.read_text(encoding="utf-8").splitlines(keepends=True)
        kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]
        self._log.write_text("".join(kept), encoding="utf-8")
