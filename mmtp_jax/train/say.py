"""What commands tell a person, beside their results: lines on stderr."""

from __future__ import annotations

import sys


def say(text: str) -> None:
    """One line, at once."""
    print(text, file=sys.stderr, flush=True)
