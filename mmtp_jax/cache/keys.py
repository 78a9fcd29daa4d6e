"""Prefix-cache keys: what a page's contents depend on.

A target page that ends at E holds entries that depend on tokens [0, E) alone. A module page depends
on N more (module m at position q consumes token q + 1 + m), so its key adds the next N tokens: with
keys of tokens [0, E), a third request could be handed a page computed for another continuation.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import NamedTuple


class PageKey(NamedTuple):
    """`prefix`: the hash of tokens [0, E); `lookahead`: the tokens [E, E + N), () for a target."""

    prefix: bytes
    lookahead: tuple[int, ...] = ()


class PrefixKeys:
    """The keys of one request's pages, computed as its tokens become known.

    `tokens` is read when a key is asked for and may grow in between; known tokens must not change.
    Hashes are chained (each covers the previous one and its own page's tokens) and cryptographic,
    because equal keys share cache contents between users.
    """

    def __init__(self, tokens: Sequence[int], page_size: int) -> None:
        self.tokens = tokens
        self.page_size = page_size
        self._prefixes: list[bytes] = []

    def prefix(self, index: int) -> bytes:
        """The hash of all tokens up to the end of page `index`; ValueError if some are unknown."""
        if index < len(self._prefixes):
            return self._prefixes[index]
        end = (index + 1) * self.page_size
        if end > len(self.tokens):
            raise ValueError(f"page {index} ends at {end}, but only {len(self.tokens)} are known")
        while len(self._prefixes) <= index:
            start = len(self._prefixes) * self.page_size
            page = self.tokens[start : start + self.page_size]
            previous = self._prefixes[-1] if self._prefixes else b""
            message = previous + struct.pack(f"<{len(page)}q", *page)
            self._prefixes.append(hashlib.blake2b(message, digest_size=32).digest())
        return self._prefixes[index]

    def lookahead(self, index: int, num_tokens: int) -> tuple[int, ...]:
        """Up to `num_tokens` known tokens after page `index`."""
        end = (index + 1) * self.page_size
        return tuple(self.tokens[end : end + num_tokens])

    def target(self, index: int) -> PageKey:
        """The key of target page `index`."""
        return PageKey(self.prefix(index))

    def module(self, index: int, num_modules: int) -> PageKey:
        """The key of module page `index`; ValueError unless all N tokens after it are known."""
        lookahead = self.lookahead(index, num_modules)
        if len(lookahead) < num_modules:
            raise ValueError(f"page {index} needs {num_modules} known tokens after it")
        return PageKey(self.prefix(index), lookahead)
