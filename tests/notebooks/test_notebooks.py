"""Every notebook runs from top to bottom in a kernel of its own, on a tiny model."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from models_for_tests import write_tiny_llama
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
# One bucket of rows, so that an engine compiles one step.
ENGINE = {
    "max_model_len": 96,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "row_multiple": 16,
    "num_pages": 64,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "01_quickstart": {"QUESTION": "hello", "MAX_TOKENS": 12},
    "02_acceptance": {"PROMPTS": ["hello", "1 + 1 = 2"], "MAX_TOKENS": 16},
    "03_profile_a_step": {"PROMPT": "hello", "STEPS": 4},
    "04_train_modules": {
        "TOPICS": ["a", "b", "c"],
        "NEW_TOPICS": ["d"],
        "MAX_TOKENS": 8,
        "STEPS": 6,
        "BATCH_TOKENS": 128,
    },
}
SHIPS_MODULES = ("02_acceptance",)
# Patterns of what the cells say when they did what they are there for. A stream shows those steps
# that the loop came to see: a matter of speed.
SAYS = {
    "01_quickstart": ("T = 1: the same tokens", r"step +\d+ \["),
    "02_acceptance": ("expected",),
    "03_profile_a_step": ("target", "verify, sample", "mtp_0"),
    "04_train_modules": ("step 6/6", "trained on:", "new:"),
}


def read(name: str) -> nbformat.NotebookNode:
    return nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)


def with_settings(notebook: nbformat.NotebookNode, settings: dict[str, Any]) -> None:
    """Add a cell that replaces values of the one tagged "parameters", as papermill does."""
    (place,) = [
        number
        for number, cell in enumerate(notebook.cells)
        if "parameters" in cell.metadata.get("tags", ())
    ]
    assert all(f"\n{name} = " in f"\n{notebook.cells[place].source}" for name in settings)
    lines = [f"{name} = {value!r}" for name, value in settings.items()]
    notebook.cells.insert(place + 1, new_code_cell("\n".join(lines)))


def said(notebook: nbformat.NotebookNode) -> str:
    """All that the cells printed or showed as text."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    texts = [output.get("text") or output.get("data", {}).get("text/plain") for output in outputs]
    return "\n".join(filter(None, texts))


def test_all_are_tested() -> None:
    assert sorted(SETTINGS) == sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb"))


@pytest.mark.parametrize("name", SETTINGS)
def test_is_stored_without_outputs(name: str) -> None:
    for cell in read(name).cells:
        assert cell.cell_type == "markdown" or (cell.outputs, cell.execution_count) == ([], None)


@pytest.fixture(scope="module", autouse=True)
def own_settings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Folders of IPython and matplotlib that know nothing of the user's."""
    with pytest.MonkeyPatch.context() as patch:
        for variable in ("IPYTHONDIR", "MPLCONFIGDIR"):
            patch.setenv(variable, str(tmp_path_factory.mktemp(variable.lower())))
        yield


@pytest.mark.parametrize("name", SETTINGS)
def test_runs(name: str, tmp_path: Path) -> None:
    family, modules = ("mimo", 2) if name in SHIPS_MODULES else ("llama", 0)
    model = write_tiny_llama(
        tmp_path / "model", family=family, modules=modules, tokenizer=True, num_hidden_layers=1
    )
    settings = {"MODEL": str(model), "ENGINE": ENGINE} | SETTINGS[name]
    if "FOLDER" in read(name).cells[1].source:
        settings["FOLDER"] = str(tmp_path / "out")
    notebook = read(name)
    with_settings(notebook, settings)
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    text = said(notebook)
    for expected in SAYS[name]:
        assert re.search(expected, text)
