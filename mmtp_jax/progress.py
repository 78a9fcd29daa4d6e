"""Progress bars on stderr, shown only on a terminal."""

from __future__ import annotations

import sys
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


class _Bar:
    def __init__(self, description: str, total: int | None, visible: bool) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
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
