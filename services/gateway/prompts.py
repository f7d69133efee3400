"""The prompts of a request: texts, token ids, conversations. Checked before anything is tokenised."""

from __future__ import annotations

from services.gateway.errors import ApiError, invalid, not_offered
from services.gateway.limits import LIMITS, check_encodable, check_ids
from services.gateway.openai_types import ChatRequest, CompletionRequest


def check_prompts(request: CompletionRequest, n: int, vocab_size: int, max_model_len: int) -> list[str | list[int]]:
    """The prompts of a completions request, each a text or token ids."""
    prompt = request.prompt
    prompts: list[str | list[int]]
    if isinstance(prompt, str):
        prompts = [prompt]
    elif prompt and all(isinstance(item, int) for item in prompt):
        prompts = [[item for item in prompt if isinstance(item, int)]]
    else:
        prompts = [item for item in prompt if not isinstance(item, int)]
        if len(prompts) != len(prompt) or len({type(item) for item in prompts}) > 1:
            raise invalid("prompt mixes texts and token ids; send one kind", "prompt")
    if not prompts or not all(prompts):
        raise invalid("prompt is empty; send at least one character or token", "prompt", "empty_prompt")
    if len(prompts) > LIMITS.prompts:
        raise invalid(f"prompt has {len(prompts)} entries; at most {LIMITS.prompts} are allowed", "prompt")
    if len(prompts) * n > LIMITS.sequences:
        raise invalid(f"{len(prompts)} prompts x n={n} is more than {LIMITS.sequences} choices", "n")
    for item in prompts:
        if isinstance(item, str):
            check_text("prompt", item, max_model_len)
        else:
            check_ids("prompt", item, vocab_size)
    return prompts


def check_messages(request: ChatRequest, max_model_len: int) -> list[dict[str, str]]:
    """The conversation as the chat template takes it: roles and texts.

    The texts of several parts are joined by newlines. The role `developer` is `system` by its newer name.
    """
    if not request.messages:
        raise invalid("messages is empty; send at least one message", "messages", "empty_prompt")
    if len(request.messages) > LIMITS.messages:
        raise invalid(f"messages has more than {LIMITS.messages} entries", "messages")
    conversation = []
    room = max_model_len * LIMITS.chars_per_token
    for i, message in enumerate(request.messages):
        where = f"messages[{i}]"
        if message.role in ("tool", "function") or message.tool_calls or message.function_call:
            raise not_offered(where, "Tool calling")
        if message.audio:
            raise not_offered(f"{where}.audio", "Audio")
        if message.role not in ("system", "developer", "user", "assistant"):
            raise invalid("role must be one of system, developer, user, assistant", f"{where}.role")
        if isinstance(message.content, list):
            for j, part in enumerate(message.content):
                if part.type != "text":
                    raise invalid("only content parts of type `text` are offered", f"{where}.content[{j}].type")
                if part.text is None:
                    raise invalid("a part of type `text` needs the field text", f"{where}.content[{j}].text")
            text = "\n".join(part.text or "" for part in message.content)
        elif message.content is None and message.role != "assistant":
            raise invalid("content is missing", f"{where}.content")
        else:
            text = message.content or ""
        check_text("messages", text, max_model_len)
        room -= len(text)
        role = "system" if message.role == "developer" else message.role
        conversation.append({"role": role, "content": text})
    if room < 0:
        raise _too_many_chars("messages", max_model_len)
    return conversation


def check_text(param: str, text: str, max_model_len: int) -> None:
    """A text that can be encoded and is not far too long for the context."""
    if len(text) > max_model_len * LIMITS.chars_per_token:
        raise _too_many_chars(param, max_model_len)
    check_encodable(param, text)


def _too_many_chars(param: str, max_model_len: int) -> ApiError:
    return invalid(
        f"{param} has more than {max_model_len * LIMITS.chars_per_token} characters; "
        f"the model's context is {max_model_len} tokens",
        param,
        "context_length_exceeded",
    )
