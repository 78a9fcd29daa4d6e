"""What commands tell a person beside their results, on stderr: lines, and bars on a terminal."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


def say(text: str) -> None:
    """One line, at once."""
    print(text, file=sys.stderr, flush=True)


class _Bar:
    def __init__(
        self, description: str, total: int | None, visible: bool, *columns: ProgressColumn
    ) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            *columns,
            TextColumn("{task.fields[note]}"),
            console=Console(stderr=True),
            transient=True,
            disable=not (visible and sys.stderr.isatty()),
        )
        self._task = self._progress.add_task(description, total=total, note="")

    def __enter__[B: _Bar](self: B) -> B:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()


class LoadingBar(_Bar):
    """Parameters loaded so far."""

    def __init__(self, total: int) -> None:
        super().__init__("Loading weights", total, True)

    def update(self) -> None:
        self._progress.update(self._task, advance=1)


class CompileBar(_Bar):
    """Programs compiled so far."""

    def __init__(self, *, visible: bool) -> None:
        super().__init__("Compiling", None, visible)

    def update(self, done: int, total: int, name: str) -> None:
        self._progress.update(self._task, completed=done, total=total, note=name)


class GenerationBar(_Bar):
    """Prompts finished so far."""

    def __init__(self, total: int, *, visible: bool) -> None:
        super().__init__("Generating", total, visible)

    def update(self, tokens_per_step: float, finished: bool) -> None:
        note = f"{tokens_per_step:.2f} tokens per step"
        self._progress.update(self._task, advance=int(finished), note=note)


class SamplesBar(_Bar):
    """Samples drawn so far, with tokens per second and the time left; where there is no terminal,
    a line for every shard of them."""

    def __init__(self, total: int, *, visible: bool) -> None:
        super().__init__("Generating", total, visible, TimeRemainingColumn())
        self._lines = visible and self._progress.disable
        self._total = total
        self._samples = self._tokens = 0
        self._start = time.perf_counter()

    def update(self, samples: int, tokens: int) -> None:
        """So many samples ended, and so many tokens came."""
        self._samples += samples
        self._tokens += tokens
        self._progress.update(self._task, advance=samples, note=self._rate())

    def shard_written(self, index: int, count: int) -> None:
        """Shard `index` of `count` is on disk."""
        if self._lines:
            seconds = time.perf_counter() - self._start
            left = (self._total - self._samples) * seconds / self._samples
            print(
                f"shard {index + 1} of {count}: {self._samples} of {self._total} samples,"
                f" {self._rate()}, {left / 60:.1f} minutes left",
                file=sys.stderr,
                flush=True,
            )

    def _rate(self) -> str:
        return f"{self._tokens / (time.perf_counter() - self._start):,.0f} tokens/s"
