"""Prefix keys: chained, incremental, and different whenever contents could differ."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmtp_jax.cache.keys import PageKey, PrefixKeys

TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=24)


@given(TOKENS, TOKENS, st.integers(1, 5), st.integers(0, 4))
def test_keys_are_equal_exactly_when_the_tokens_they_cover_are(
    left: list[int], right: list[int], page_size: int, num_modules: int
) -> None:
    keys = PrefixKeys(left, page_size), PrefixKeys(right, page_size)
    for index in range((min(len(left), len(right)) - num_modules) // page_size):
        end = (index + 1) * page_size
        assert (keys[0].target(index) == keys[1].target(index)) == (left[:end] == right[:end])
        covered = end + num_modules
        same = left[:covered] == right[:covered]
        assert (keys[0].module(index, num_modules) == keys[1].module(index, num_modules)) == same


@given(TOKENS, st.integers(1, 5))
def test_keys_of_a_growing_list_equal_those_of_the_whole(tokens: list[int], page_size: int) -> None:
    growing: list[int] = []
    incremental = PrefixKeys(growing, page_size)
    for token in tokens:
        growing.append(token)
        if len(growing) % page_size == 0:
            incremental.prefix(len(growing) // page_size - 1)
    whole = PrefixKeys(tokens, page_size)
    for index in range(len(tokens) // page_size):
        assert incremental.prefix(index) == whole.prefix(index)


def test_a_key_depends_on_the_position() -> None:
    keys = PrefixKeys([1, 2, 1, 2], 2)
    assert keys.prefix(0) != keys.prefix(1)
    assert keys.module(0, 2) == PageKey(keys.prefix(0), (1, 2))


def test_unknown_tokens_have_no_key() -> None:
    keys = PrefixKeys([1, 2, 3], 2)
    assert keys.lookahead(0, 5) == (3,)
    with pytest.raises(ValueError, match="page 1 ends at 4, but only 3 are known"):
        keys.prefix(1)
    with pytest.raises(ValueError, match="page 0 needs 2 known tokens after it"):
        keys.module(0, 2)
