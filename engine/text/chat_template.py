"""Chat templates: Jinja in a sandbox, compiled at start, bounded in size and time."""

import json
import time
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.config import ModelError
from engine.text.tokenizer import token_text, tokenizer_config

_MAX_TEMPLATE = 1 << 20  # characters
_MAX_OUTPUT = 16 << 20  # characters, also of one product of a text and a number
_MAX_SECONDS = 2.0  # of CPU time
_MAX_POWER = 4096  # bits

# CPU time of this thread at which the rendering under way must have ended.
_deadline: ContextVar[float] = ContextVar("_deadline", default=float("inf"))


class TemplateError(ValueError):
    """The template refuses these messages, or takes too long; the message is for the client."""


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox bounds `range` and forbids dunder attributes and changes of arguments; this bounds time, too."""

    intercepted_binops = frozenset({"*", "**"})

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """Looks at the clock at the beginning of every round of a loop and of every call of a macro."""
        template = super()._parse(source, name, filename)
        blocks: list[nodes.For | nodes.Macro] = [*template.find_all(nodes.For), *template.find_all(nodes.Macro)]
        for block in blocks:
            tick = nodes.Call(nodes.EnvironmentAttribute("tick"), [], [], None, None)
            block.body.insert(0, nodes.ExprStmt(tick))
        template.set_environment(self)
        return template

    def tick(self) -> None:
        """Raises TemplateError when the time is up."""
        if time.thread_time() > _deadline.get():
            raise TemplateError("the chat template takes too long")

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Refuses products and powers of monstrous size."""
        too_large = False
        if operator == "**" and isinstance(left, int) and isinstance(right, int):
            too_large = left.bit_length() * right > _MAX_POWER
        elif operator == "*":
            for some, times in ((left, right), (right, left)):
                if isinstance(some, str | bytes | list | tuple) and isinstance(times, int):
                    too_large = len(some) * times > _MAX_OUTPUT
        if too_large:
            raise TemplateError("the chat template computes something too large")
        return super().call_binop(context, operator, left, right)


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks what the assistant said, for training; here it is its content."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        """The content in a scope of its own."""
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class ChatTemplate:
    """One compiled template. Raises ModelError if it is malformed."""

    def __init__(self, source: str, **tokens: str) -> None:
        """`tokens`: texts of the model's special tokens by the names that templates use, such as `bos_token`."""
        if len(source) > _MAX_TEMPLATE:
            raise ModelError(f"the chat template has {len(source)} characters, more than {_MAX_TEMPLATE}")
        environment = _Environment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationTag]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ModelError(f"the chat template is malformed in line {error.lineno}: {error.message}") from error
        except RecursionError as error:
            raise ModelError("the chat template is nested too deeply") from error
        self._variables: dict[str, Any] = {"tools": None, "documents": None, **tokens}

    @classmethod
    def from_folder(cls, folder: Path) -> "ChatTemplate | None":
        """The template of a model folder: chat_template.jinja, or an entry of tokenizer_config.json; None without."""
        config = tokenizer_config(folder)
        own = folder / "chat_template.jinja"
        try:
            source = own.read_text(encoding="utf-8") if own.exists() else config.get("chat_template")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(f"{own} cannot be read: {error}") from error
        if isinstance(source, list):  # several, by name
            named = [entry for entry in source if isinstance(entry, dict)]
            source = next((entry.get("template") for entry in named if entry.get("name") == "default"), None)
        if not isinstance(source, str):
            return None
        tokens = {name: token_text(value) for name, value in config.items() if name.endswith("_token")}
        return cls(source, **{name: text for name, text in tokens.items() if text is not None})

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The prompt of a conversation. Raises TemplateError."""
        known = self._variables | variables | {"messages": messages, "add_generation_prompt": add_generation_prompt}
        pieces: list[str] = []
        size = 0
        outer = _deadline.set(time.thread_time() + _MAX_SECONDS)
        try:
            for piece in self._template.generate(known):
                pieces.append(piece)
                size += len(piece)
                if size > _MAX_OUTPUT:
                    raise TemplateError(f"the chat template writes more than {_MAX_OUTPUT} characters")
        except TemplateError:
            raise
        except Exception as error:  # a template can raise whatever an expression can
            raise TemplateError(str(error) or type(error).__name__) from error
        finally:
            _deadline.reset(outer)
        return "".join(pieces)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As templates expect it: no escapes for HTML, characters as they are."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)
