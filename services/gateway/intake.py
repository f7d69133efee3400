"""From the body of a request to a generation that is ready to run: validate, admit, tokenise."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from engine.config import ModelError, read_config
from engine.text.chat_prompt import chat_prompt
from engine.text.chat_template import ChatTemplate, TemplateError
from engine.text.tokenizer import Tokenizer
from services.config import GatewayConfig
from services.gateway import validation
from services.gateway.errors import context_length_exceeded, invalid, model_not_found, overloaded, unavailable
from services.gateway.formats import ChatFormat, CompletionFormat, Format, Head
from services.gateway.generation import Generation, Plan, Running
from services.gateway.model_names import model_names
from services.gateway.openai_types import ChatRequest, CompletionRequest
from services.gateway.prompts import check_messages, check_prompts
from services.gateway.validation import Options
from services.rpc import cluster_pb2

_LONG_TEXT = 20_000  # characters; tokenised on another thread, so that streams do not wait
T = TypeVar("T")


class TextModel:
    """Tokenizer, chat template and end tokens of a model folder. Raises ModelError for a malformed one."""

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise ModelError(f"the model folder {folder} does not exist; set TANDEM_MODEL to one with a tokenizer.json")
        config = read_config(folder)
        self.tokenizer = Tokenizer.from_folder(folder)
        self.template = ChatTemplate.from_folder(folder)
        self.vocab_size = min(self.tokenizer.vocab_size, config.vocab_size)
        eos = self.tokenizer.id_of(self.tokenizer.eos_token)
        self.eos_token_ids = tuple(sorted({*config.eos_token_ids, *(() if eos is None else (eos,))}))


class Intake:
    """Turns bodies into generations, at most `max_in_flight` sequences at a time."""

    def __init__(self, config: GatewayConfig, text: TextModel, running: Running) -> None:
        self.model_name = config.model_name or Path(config.model).name
        self.model_names = model_names(self.model_name, config.model_aliases)
        self.in_flight = 0  # sequences
        self._config = config
        self._text = text
        self._running = running
        self._completion = msgspec.json.Decoder(CompletionRequest)
        self._chat = msgspec.json.Decoder(ChatRequest)

    async def completion(self, body: bytes, tenant: str, session: str = "") -> tuple[Generation, Callable[[], None]]:
        """A generation for a body of /v1/completions, and what to call when it has ended. Raises ApiError."""
        request = validation.decode(body, self._completion)
        card, room = self._card(request.model)
        options = validation.completion_options(request, self._text.vocab_size)
        prompts = check_prompts(request, options.n, self._text.vocab_size, room)

        async def tokenise() -> Generation:
            ids = [prompt if isinstance(prompt, list) else await self._encode(prompt) for prompt in prompts]
            plan = self._plan(
                "cmpl-", "prompt", ids, options, CompletionFormat(self._text.tokenizer, options), card, request.model,
                tenant, session, ignore_eos=bool(request.ignore_eos),
            )  # fmt: skip
            return Generation(plan, self._running, self._text.tokenizer)

        return await self._admitted(len(prompts) * options.n, tokenise)

    async def chat(self, body: bytes, tenant: str, session: str = "") -> tuple[Generation, Callable[[], None]]:
        """A generation for a body of /v1/chat/completions, and what to call when it has ended. Raises ApiError."""
        request = validation.decode(body, self._chat)
        card, room = self._card(request.model)
        options = validation.chat_options(request, self._text.vocab_size)
        messages = check_messages(request, room)
        template = self._text.template
        if template is None:
            raise invalid("this model has no chat template; use /v1/completions", "messages", "no_chat_template")

        async def tokenise() -> Generation:
            size = sum(len(message["content"]) for message in messages)
            try:
                ids = await _maybe_threaded(size, lambda: chat_prompt(self._text.tokenizer, template, messages))
            except TemplateError as error:
                raise invalid(f"The chat template refuses the messages: {error}", "messages", "chat_template") from None
            plan = self._plan(
                "chatcmpl-", "messages", [ids], options, ChatFormat(self._text.tokenizer, options), card, request.model,
                tenant, session, ignore_eos=bool(request.ignore_eos),
            )  # fmt: skip
            return Generation(plan, self._running, self._text.tokenizer)

        return await self._admitted(options.n, tokenise)

    # Inside

    def _card(self, model: str) -> tuple[cluster_pb2.ModelCard, int]:
        """The model's card, and the tokens that prompt and output may have together."""
        if model not in self.model_names:
            raise model_not_found(model)
        card = self._running.placements.model
        if card is None:
            raise unavailable("No worker has come up yet")
        return card, min(card.max_model_len, card.num_blocks * card.block_size)

    async def _admitted(
        self, count: int, tokenise: Callable[[], Awaitable[Generation]]
    ) -> tuple[Generation, Callable[[], None]]:
        if self.in_flight + count > self._config.max_in_flight:
            raise overloaded(f"More than {self._config.max_in_flight} sequences are under way; try again later")
        self.in_flight += count

        def release() -> None:
            self.in_flight -= count

        try:
            return await tokenise(), release
        except BaseException:
            release()
            raise

    async def _encode(self, text: str) -> list[int]:
        return await _maybe_threaded(len(text), lambda: self._text.tokenizer.encode(text))

    def _plan(
        self,
        prefix: str,
        param: str,
        prompts: list[list[int]],
        options: Options,
        form: Format,
        card: cluster_pb2.ModelCard,
        model: str,
        tenant: str,
        session: str,
        *,
        ignore_eos: bool,
    ) -> Plan:
        room = min(card.max_model_len, card.num_blocks * card.block_size)
        for ids in prompts:
            if not ids:
                raise invalid(f"{param} has no tokens", param, "empty_prompt")
            if len(ids) + (options.max_tokens != 0) > room:
                raise context_length_exceeded(param, len(ids), room)
        return Plan(
            head=Head(prefix + secrets.token_hex(16), int(time.time()), model),
            options=options,
            format=form,
            prompts=prompts,
            eos_token_ids=() if ignore_eos else self._text.eos_token_ids,
            card=card,
            room=room,
            tenant=tenant,
            session=session,
            cache_salt=_cache_salt(tenant, options.cache_salt),
            deadline=time.monotonic() + self._config.request_timeout,
        )


async def _maybe_threaded(size: int, work: Callable[[], T]) -> T:
    return await asyncio.to_thread(work) if size > _LONG_TEXT else work()


def _cache_salt(tenant: str, chosen: str) -> str:
    """Keeps tenants' caches apart, and within a tenant those of different salts."""
    if not tenant and not chosen:
        return ""
    return hashlib.sha256(f"{len(tenant)}:{tenant}{chosen}".encode()).hexdigest()[:32]
