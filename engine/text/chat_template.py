"""Chat templates: Jinja in a sandbox, compiled at start, bounded in size and time."""

import json
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.config import ModelError

_MAX_TEMPLATE = 1 << 20  # characters
_MAX_OUTPUT = 16 << 20
_MAX_SECONDS = 2.0


class TemplateError(ValueError):
    """The template refuses these messages, or takes too long; the message is for the client."""


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox bounds `range` and forbids dunder attributes and changes of arguments."""


class ChatTemplate:
    """One compiled template. Raises ModelError if it is malformed."""

    def __init__(self, source: str, *, bos_token: str | None = None, eos_token: str | None = None) -> None:
        if len(source) > _MAX_TEMPLATE:
            raise ModelError(f"the chat template has {len(source)} characters, more than {_MAX_TEMPLATE}")
        environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols])
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ModelError(f"the chat template is malformed in line {error.lineno}: {error.message}") from error
        self._tokens = {"bos_token": bos_token or "", "eos_token": eos_token or ""}

    @classmethod
    def from_folder(cls, folder: Path) -> "ChatTemplate | None":
        """The template of a model folder: chat_template.jinja, or an entry of tokenizer_config.json; None without."""
        path = folder / "tokenizer_config.json"
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        own = folder / "chat_template.jinja"
        source = own.read_text(encoding="utf-8") if own.exists() else config.get("chat_template")
        if isinstance(source, list):  # several, by name
            source = next((entry["template"] for entry in source if entry.get("name") == "default"), None)
        if not isinstance(source, str):
            return None
        tokens = {name: config.get(name) for name in ("bos_token", "eos_token")}
        texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in tokens.items()}
        return cls(source, **texts)

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The prompt of a conversation. Raises TemplateError."""
        deadline = time.monotonic() + _MAX_SECONDS
        pieces: list[str] = []
        size = 0
        try:
            for piece in self._template.generate(
                messages=messages, add_generation_prompt=add_generation_prompt, **self._tokens, **variables
            ):
                pieces.append(piece)
                size += len(piece)
                if size > _MAX_OUTPUT or time.monotonic() > deadline:
                    raise TemplateError("the chat template takes too long or writes too much")
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, OverflowError, RecursionError) as error:
            if isinstance(error, TemplateError):
                raise
            raise TemplateError(str(error)) from error
        return "".join(pieces)


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)
