"""Finds the tokenizer of the model that is measured, on this machine."""

import os
from pathlib import Path

from bench.errors import BenchError

_FILE = "tokenizer.json"


def find_tokenizer(name: str, model: str, root: str) -> Path:
    """Path of a tokenizer.json.

    `name`: what the user gave, a folder, a file or the id of a model in the Hugging Face cache; else it is looked for
    by `root`, where the server says that it has its model from, and by the name of the `model`. Raises BenchError.
    """
    for asked in filter(None, (name, root, model)):
        for path in (*_named(Path(asked).expanduser()), *_in_hub_cache(asked), *_in_own_cache(asked)):
            if path.is_file():
                return path.resolve()
        if name:
            raise BenchError(f"--tokenizer {name}: no {_FILE} there, nor such a model in the Hugging Face cache")
    raise BenchError(
        f"the tokenizer of {model} is not on this machine, and prompts are made in its tokens: "
        f"name it with --tokenizer FOLDER or {_FILE}"
    )


def _named(path: Path) -> list[Path]:
    return [path / _FILE] if path.is_dir() else [path] if path.suffix == ".json" else []


def _in_hub_cache(model: str) -> list[Path]:
    home = os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface"
    hub = Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub")
    return _newest_first(hub / f"models--{model.replace('/', '--')}" / "snapshots", "*")


def _in_own_cache(model: str) -> list[Path]:
    """Where Tandem keeps converted models, by name and quantisation."""
    cache = os.environ.get("TANDEM_CACHE") or Path.home() / ".cache" / "tandem"
    name = Path(model).name
    return _newest_first(Path(cache) / "models", f"{name}-*") + _newest_first(Path(cache) / "models", f"{name}.*")


def _newest_first(folder: Path, pattern: str) -> list[Path]:
    if any(letter in pattern[:-1] for letter in "*?[/"):
        return []
    found = [path / _FILE for path in folder.glob(pattern) if (path / _FILE).is_file()]
    return sorted(found, key=lambda path: path.stat().st_mtime, reverse=True)
