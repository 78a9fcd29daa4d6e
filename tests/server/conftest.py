"""The two servers that most tests of the HTTP interface share: with speculation and without."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from models_for_tests import JSON_CHARACTERS, write_tiny_llama
from server.running import SMALL, Server, running

MODULES = 3
# The tiny model's own, but for `short`: the description of tools fills its context several times.
TEMPLATE = (
    "{% for message in messages if not short or message['role'] != 'system' %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with three random modules, a tokenizer and a chat template."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    return write_tiny_llama(
        folder, family="mimo", modules=MODULES, tokenizer=True, characters=JSON_CHARACTERS
    )


@pytest.fixture(scope="session")
def server(tiny: Path) -> Iterator[Server]:
    """A server that speculates."""
    with running(tiny, *SMALL, f"--chat-template={TEMPLATE}") as server:
        yield server


@pytest.fixture(scope="session")
def plain_server(tiny: Path) -> Iterator[Server]:
    """The same model without speculation."""
    options = (f"--chat-template={TEMPLATE}", "--num-speculative-tokens=0")
    with running(tiny, *SMALL, *options) as server:
        yield server
