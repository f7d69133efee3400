"""The models that a gateway serves: the text side of each, and the names under which requests may ask for them.

Which folder a model's tokenizer and chat template lie in, the gateway is told by its own settings alone: what workers
say of themselves in the cluster state is no path to read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import structlog

from engine.config import ModelError, read_config
from engine.text.chat_template import ChatTemplate
from engine.text.tokenizer import Tokenizer
from services.config import ConfigError, GatewayConfig
from services.gateway.errors import model_not_found
from services.rpc import cluster_pb2

log = structlog.get_logger()


class TextModel:
    """Tokenizer, chat template and end tokens of a model folder. Raises ModelError for a malformed one."""

    def __init__(self, name: str, folder: Path) -> None:
        if not folder.is_dir():
            raise ModelError(f"the model folder {folder} does not exist; name one with a tokenizer.json for {name}")
        config = read_config(folder)
        self.name = name
        self.tokenizer = Tokenizer.from_folder(folder)
        self.template = ChatTemplate.from_folder(folder)
        self.vocab_size = min(self.tokenizer.vocab_size, config.vocab_size)
        eos = self.tokenizer.id_of(self.tokenizer.eos_token)
        self.eos_token_ids = tuple(sorted({*config.eos_token_ids, *(() if eos is None else (eos,))}))


class Models:
    """All of them, first that of the setting `model`. Raises ConfigError or ModelError."""

    def __init__(self, config: GatewayConfig) -> None:
        folders = model_folders(config)
        self._model_of = model_names(folders, config.model_aliases)
        self._texts = {name: TextModel(name, folder) for name, folder in folders.items()}
        self._strangers: set[str] = set()

    def __iter__(self) -> Iterator[str]:
        """Their own names."""
        return iter(self._texts)

    @property
    def names(self) -> tuple[str, ...]:
        """Their own names, and aliases behind these."""
        return tuple(self._model_of)

    def of(self, name: str) -> TextModel:
        """The model that has this name or alias. Raises ApiError 404."""
        if name not in self._model_of:
            raise model_not_found(name, self.names)
        return self._texts[self._model_of[name]]

    def on_change(self, _change: str, member: cluster_pb2.Member) -> None:
        """Says once of a model that workers have that nobody can ask for it here."""
        name = member.model.name
        if member.HasField("model") and name not in self._texts and name not in self._strangers:
            self._strangers.add(name)
            served = ", ".join(self._texts)
            log.warning("a worker has a model that is not served here; see more_models", model=name, served=served)


def model_folders(config: GatewayConfig) -> dict[str, Path]:
    """Where each model's text side is, by the model's own name. Raises ConfigError."""
    folders = {config.model_name or Path(config.model).name: Path(config.model)}
    for name, folder in _pairs("more_models", config.more_models, "NAME=FOLDER, as qwen=/models/Qwen3-0.6B"):
        if name in folders:
            raise ConfigError(f"more_models: the name {name!r} is given twice")
        folders[name] = Path(folder)
    return folders


def model_names(served: Iterable[str], aliases: str) -> dict[str, str]:
    """The model that each name stands for: those `served`, then aliases. Raises ConfigError."""
    names = {name: name for name in served}
    models = tuple(names)
    for alias, model in _pairs("model_aliases", aliases, f"ALIAS=MODEL, as gpt-4o={models[0]}"):
        if model not in models:
            raise ConfigError(
                f"model_aliases: {alias!r} stands for {model!r}, but this cluster serves {', '.join(models)}"
            )
        if alias in names:
            raise ConfigError(f"model_aliases: the name {alias!r} is given twice")
        names[alias] = model
    return names


def _pairs(setting: str, text: str, form: str) -> Iterator[tuple[str, str]]:
    """KEY=VALUE, comma separated. Raises ConfigError."""
    for part in filter(None, map(str.strip, text.split(","))):
        key, equals, value = map(str.strip, part.partition("="))
        if not (key and equals and value):
            raise ConfigError(f"{setting}: {part!r} is not {form}")
        yield key, value
