"""From chat messages to prompt ids, such that no message can bring control tokens in."""

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from engine.text.chat_template import ChatTemplate
from engine.text.tokenizer import Tokenizer


def chat_prompt(
    tokenizer: Tokenizer, template: ChatTemplate, messages: Sequence[Mapping[str, Any]], **options: Any
) -> list[int]:
    """Ids of the rendered conversation. `options` go to the template. Raises TemplateError.

    Messages without the text of special tokens, nearly all, are rendered and encoded as they are. Otherwise markers
    that nobody can guess stand in for the texts while the template runs, and the texts are encoded as plain characters.
    """
    texts = [value for message in messages for value in message.values() if isinstance(value, str)]
    if not any(tokenizer.has_special_text(text) for text in texts):
        return tokenizer.encode_template(template.render(messages, **options))
    originals: dict[str, str] = {}

    def hidden(name: str, value: Any) -> Any:
        if name == "role" or not isinstance(value, str):
            return value
        marker = f"\ue000{secrets.token_hex(16)}\ue001"
        originals[marker] = value
        return marker

    rendered = template.render([{k: hidden(k, v) for k, v in message.items()} for message in messages], **options)
    ids: list[int] = []
    while rendered:
        at, marker = min(((rendered.find(m), m) for m in originals if m in rendered), default=(len(rendered), ""))
        ids += tokenizer.encode_template(rendered[:at])
        ids += tokenizer.encode_plain(originals.get(marker, ""))
        rendered = rendered[at + len(marker) :]
    return ids
