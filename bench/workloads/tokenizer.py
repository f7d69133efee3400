"""Finds the tokenizer of the model that is measured, on this machine."""

import os
import re
from pathlib import Path

from bench.errors import BenchError
from engine.weights.resolve import cache_folder

_FILE = "tokenizer.json"
_CONVERTED = r"(?:\.[A-Za-z]+\d\w*)?-[0-9a-f]{16}"  # what Tandem appends to a model's name: quantisation and digest


def find_tokenizer(name: str, model: str, root: str) -> Path:
    """Path of a tokenizer.json.

    `name`: what the user gave, a folder, a file or the id of a model in the Hugging Face cache. Empty: it is looked for
    by `root`, where the server says that it has its model from, and by the id of the `model` that it serves, in these
    places and in Tandem's cache of converted models. Raises BenchError when there is none.
    """
    for asked in [name] if name else filter(None, (root, model)):
        for path in (*_named(Path(asked).expanduser()), *_in_hub_cache(asked), *_in_own_cache(asked)):
            if path.is_file():
                return path.absolute()  # links stay: what they lead to does not lie beside tokenizer_config.json
    if name:
        raise BenchError(f"--tokenizer {name}: there is no {_FILE}, and no such model in the Hugging Face cache")
    raise BenchError(
        f"the tokenizer of {model} is not on this machine, and prompts are made in its tokens: "
        f"name it with --tokenizer, a folder with {_FILE} or the file itself"
    )


def _named(path: Path) -> list[Path]:
    return [path / _FILE] if path.is_dir() else [path] if path.suffix == ".json" else []


def _in_hub_cache(model: str) -> list[Path]:
    home = os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface"
    hub = Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub")
    return _newest_first(hub / f"models--{model.replace('/', '--')}" / "snapshots", ".*")


def _in_own_cache(model: str) -> list[Path]:
    return _newest_first(cache_folder() / "models", re.escape(Path(model).name.removesuffix(".gguf")) + _CONVERTED)


def _newest_first(folder: Path, pattern: str) -> list[Path]:
    """Tokenizers in the folders whose names match."""
    found = [path for path in folder.glob(f"*/{_FILE}") if re.fullmatch(pattern, path.parent.name)]
    return sorted(found, key=lambda path: path.stat().st_mtime, reverse=True)
