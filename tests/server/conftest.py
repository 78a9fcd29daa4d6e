"""The two servers that most tests of the HTTP interface share: with speculation and without."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from models_for_tests import write_tiny_llama
from server.running import SMALL, Server, running

MODULES = 3


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with three random modules, a tokenizer and a chat template."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    return write_tiny_llama(folder, family="mimo", modules=MODULES, tokenizer=True)


@pytest.fixture(scope="session")
def server(tiny: Path) -> Iterator[Server]:
    """A server that speculates."""
    with running(tiny, *SMALL) as server:
        yield server


@pytest.fixture(scope="session")
def plain_server(tiny: Path) -> Iterator[Server]:
    """The same model without speculation."""
    with running(tiny, *SMALL, "--num-speculative-tokens=0") as server:
        yield server
