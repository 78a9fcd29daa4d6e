"""The shape of the repository: which way imports point, what stays free of jax, what lies where."""

from __future__ import annotations

import ast
import graphlib
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# A part of mmtp_jax imports its own layer and lower ones only. Modules directly below mmtp_jax
# that are not named here (the commands, the public API) are the top layer.
LAYERS: dict[str, int] = {
    "checks": 0,
    "specs": 0,
    "config": 0,
    "progress": 0,
    "adaptive": 1,
    "cache": 1,
    "families": 1,
    "models": 1,
    "modules": 1,
    "sampling": 1,
    "speculative": 1,
    "tokenizer": 1,
    "weights": 1,
    "engine": 2,
    "loader": 2,
    "outputs": 2,
    "server": 3,
    "bench": 4,
    "export": 4,
    "train": 4,
}
TOP = 4

HOST_ONLY = (
    "mmtp_jax",
    "mmtp_jax.checks",
    "mmtp_jax.specs",
    "mmtp_jax.config",
    "mmtp_jax.cache.keys",
    "mmtp_jax.cache.pool",
    "mmtp_jax.cache.manager",
    "mmtp_jax.cache.prefix",
    "mmtp_jax.arguments",
    "mmtp_jax.engine.delta",
    "mmtp_jax.engine.request",
    "mmtp_jax.engine.scheduler",
    "mmtp_jax.outputs",
    "mmtp_jax.sampling.params",
    "mmtp_jax.serve",
    "mmtp_jax.server.app",
    "mmtp_jax.server.run",
)
JAX_PACKAGES = {"jax", "jaxlib", "flax", "jaxtyping", "optax", "orbax", "pallas_kernels"}

TOP_LEVEL = {
    ".ci",
    ".gitignore",
    ".pre-commit-config.yaml",
    ".python-version",
    "LICENSE",
    "README.md",
    "checkpoints",
    "mmtp_jax",
    "notebooks",
    "pallas_kernels",
    "pyproject.toml",
    "tests",
}
MAX_LINES = 400
MACHINE_PATHS = ("/" + "work/", "/" + "tmp/")


def python_files(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def source_of(module: str) -> Path:
    path = ROOT.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def imported_modules(path: Path) -> Iterator[str]:
    """Every module that `path` imports at any depth, as an absolute dotted name.

    `from package import name` yields `package.name` too, since `name` may be a module.
    """
    package = path.relative_to(ROOT).parent.parts
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            prefix = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join([*prefix, *([node.module] if node.module else [])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def part_of(module: str) -> str | None:
    """`cache` for `mmtp_jax.cache.pool`; None for the package itself and for other packages."""
    names = module.split(".")
    if names[0] != "mmtp_jax" or len(names) < 2 or names[1] == "__init__":
        return None
    part = ROOT / "mmtp_jax" / names[1]
    return names[1] if part.is_dir() or part.with_suffix(".py").is_file() else None


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def tracked_files() -> list[Path]:
    """The files under version control that exist; skips the test outside a git checkout."""
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    listing = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listing.returncode != 0:
        pytest.skip("not a git checkout")
    paths = (ROOT / name for name in listing.stdout.split("\0") if name)
    return [path for path in paths if path.is_file()]


def test_imports_point_to_lower_layers() -> None:
    wrong = []
    for path in python_files("mmtp_jax"):
        part = part_of(module_name(path))
        if part is None:
            continue
        for module in imported_modules(path):
            other = part_of(module)
            if other is not None and LAYERS.get(other, TOP) > LAYERS.get(part, TOP):
                wrong.append(f"{module_name(path)} imports {module}")
    assert not wrong


def test_every_folder_has_a_layer() -> None:
    folders = {path.parent.name for path in (ROOT / "mmtp_jax").glob("*/__init__.py")}
    assert folders <= set(LAYERS)


def test_modules_do_not_import_each_other_in_circles() -> None:
    files = {module_name(path): path for path in python_files("mmtp_jax")}
    graph = {name: set(imported_modules(path)) & set(files) for name, path in files.items()}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, naming the circle


def test_pallas_kernels_import_nothing_from_mmtp_jax() -> None:
    wrong = [
        f"{module_name(path)} imports {module}"
        for path in python_files("pallas_kernels")
        for module in imported_modules(path)
        if module.split(".")[0] == "mmtp_jax"
    ]
    assert not wrong


@pytest.mark.parametrize("module", HOST_ONLY)
def test_host_modules_do_not_name_jax(module: str) -> None:
    imported = {name.split(".")[0] for name in imported_modules(source_of(module))}
    assert not imported & JAX_PACKAGES


@pytest.mark.parametrize("module", HOST_ONLY)
def test_importing_a_host_module_does_not_load_jax(module: str) -> None:
    program = f"import sys, {module}; print(*sorted({{'jax', 'flax'}} & set(sys.modules)))"
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], cwd=ROOT, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == ""


def test_files_stay_short() -> None:
    lengths = {
        module_name(path): len(path.read_text(encoding="utf-8").splitlines())
        for path in python_files("mmtp_jax")
    }
    assert {name: lines for name, lines in lengths.items() if lines > MAX_LINES} == {}


def test_top_level_holds_only_known_names() -> None:
    assert {path.relative_to(ROOT).parts[0] for path in tracked_files()} <= TOP_LEVEL


def test_no_file_names_a_path_of_one_machine() -> None:
    wrong = [
        f"{path.relative_to(ROOT)} mentions {machine_path}"
        for path in tracked_files()
        for machine_path in MACHINE_PATHS
        if machine_path.encode() in path.read_bytes()
    ]
    assert not wrong
