"""From chat messages to prompt ids, such that no message can bring control tokens in."""

from collections.abc import Mapping, Sequence
from typing import Any

from engine.text.chat_template import ChatTemplate
from engine.text.tokenizer import Tokenizer


def chat_prompt(
    tokenizer: Tokenizer, template: ChatTemplate, messages: Sequence[Mapping[str, Any]], **options: Any
) -> list[int]:
    """Ids of the rendered conversation. `options` go to the template. Raises TemplateError.

    The texts of special tokens in `messages` and `options` are hidden from the template and come back as plain
    characters; the rest of each text is as the client wrote it, so that a template may trim it or look into it.
    """
    quoted: dict[str, str] = {}

    def safe(value: Any) -> Any:
        if isinstance(value, str):
            return tokenizer.quote(value, quoted)
        if isinstance(value, Mapping):
            return {safe(key): safe(entry) for key, entry in value.items()}
        if isinstance(value, list | tuple):
            return [safe(entry) for entry in value]
        return value

    rendered = template.render(safe(messages), **safe(options))
    return tokenizer.encode_template(rendered, quoted)
