"""From the body of a request to a generation that is ready to run: validate, admit, tokenise."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import sys
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec

from engine.text.chat_prompt import chat_prompt
from engine.text.chat_template import TemplateError
from services.api_keys import Tenant
from services.config import GatewayConfig
from services.gateway import validation
from services.gateway.errors import (
    context_length_exceeded,
    forbidden,
    invalid,
    overloaded,
    unavailable,
)
from services.gateway.formats import ChatFormat, CompletionFormat, Format, Head
from services.gateway.generation import Generation, Plan, Running
from services.gateway.metrics import GatewayMetrics
from services.gateway.models import Models, TextModel
from services.gateway.openai_types import ChatRequest, CompletionRequest
from services.gateway.prompts import check_messages, check_prompts
from services.gateway.validation import Options
from services.rpc import cluster_pb2

_LONG_TEXT = 20_000  # characters; tokenised on another thread, so that streams do not wait
T = TypeVar("T")
Started = tuple[Generation, Callable[[], None]]  # and what to call when it has ended


class Intake:
    """Turns bodies into generations, at most `max_in_flight` sequences at a time."""

    def __init__(self, config: GatewayConfig, models: Models, running: Running, metrics: GatewayMetrics) -> None:
        self.in_flight = 0  # sequences
        self._config = config
        self._models = models
        self._running = running
        self._metrics = metrics
        self._completion = msgspec.json.Decoder(CompletionRequest)
        self._chat = msgspec.json.Decoder(ChatRequest)

    async def completion(self, body: bytes, tenant: Tenant, session: str = "") -> Started:
        """A generation for a body of /v1/completions, and what to call when it has ended. Raises ApiError."""
        request = validation.decode(body, self._completion)
        text = self._models.of(request.model)
        known = self._running.placements.card(text.name)
        options = validation.completion_options(request, text.vocab_size)
        _check_priority(options, tenant)
        prompts = check_prompts(request, options.n, text.vocab_size, _room(known))

        async def tokenise(card: cluster_pb2.ModelCard) -> Generation:
            ids = [prompt if isinstance(prompt, list) else await _encode(text, prompt) for prompt in prompts]
            plan = self._plan(
                "cmpl-", "prompt", ids, options, CompletionFormat(text.tokenizer, options), text, card, request.model,
                tenant, session, ignore_eos=bool(request.ignore_eos),
            )  # fmt: skip
            return Generation(plan, self._running, text.tokenizer)

        return await self._admitted(text.name, known, len(prompts) * options.n, tokenise)

    async def chat(self, body: bytes, tenant: Tenant, session: str = "") -> Started:
        """A generation for a body of /v1/chat/completions, and what to call when it has ended. Raises ApiError."""
        request = validation.decode(body, self._chat)
        text = self._models.of(request.model)
        known = self._running.placements.card(text.name)
        options = validation.chat_options(request, text.vocab_size)
        _check_priority(options, tenant)
        messages = check_messages(request, _room(known))
        template = text.template
        if template is None:
            raise invalid("this model has no chat template; use /v1/completions", "messages", "no_chat_template")

        async def tokenise(card: cluster_pb2.ModelCard) -> Generation:
            size = sum(len(message["content"]) for message in messages)
            try:
                ids = await _maybe_threaded(size, lambda: chat_prompt(text.tokenizer, template, messages))
            except TemplateError as error:
                raise invalid(f"The chat template refuses the messages: {error}", "messages", "chat_template") from None
            plan = self._plan(
                "chatcmpl-", "messages", [ids], options, ChatFormat(text.tokenizer, options), text, card, request.model,
                tenant, session, ignore_eos=bool(request.ignore_eos),
            )  # fmt: skip
            return Generation(plan, self._running, text.tokenizer)

        return await self._admitted(text.name, known, options.n, tokenise)

    # Inside

    async def _admitted(
        self,
        model: str,
        card: cluster_pb2.ModelCard | None,
        count: int,
        tokenise: Callable[[cluster_pb2.ModelCard], Awaitable[Generation]],
    ) -> Started:
        """The planner hears of who is refused here, too: perhaps it is the first request for a model at rest."""
        if card is None:
            self._metrics.turned_away.labels(model).inc(count)
            raise unavailable(f"No worker of the model `{model}` has come up yet")
        if self.in_flight + count > self._config.max_in_flight:
            self._metrics.turned_away.labels(model).inc(count)
            raise overloaded(f"More than {self._config.max_in_flight} sequences are under way; try again later")
        self.in_flight += count

        def release() -> None:
            self.in_flight -= count

        try:
            return await tokenise(card), release
        except BaseException:
            release()
            raise

    def _plan(
        self,
        prefix: str,
        param: str,
        prompts: list[list[int]],
        options: Options,
        form: Format,
        text: TextModel,
        card: cluster_pb2.ModelCard,
        model: str,
        tenant: Tenant,
        session: str,
        *,
        ignore_eos: bool,
    ) -> Plan:
        room = _room(card)
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
            eos_token_ids=() if ignore_eos else text.eos_token_ids,
            card=card,
            room=room,
            tenant=tenant,
            session=session,
            cache_salt=_cache_salt(tenant.cache, options.cache_salt),
            deadline=time.monotonic() + self._config.request_timeout,
        )


def _room(card: cluster_pb2.ModelCard | None) -> int:
    """Tokens that prompt and output may have together; without a card nobody knows a bound."""
    return sys.maxsize if card is None else min(card.max_model_len, card.num_blocks * card.block_size)


def _check_priority(options: Options, tenant: Tenant) -> None:
    """Lower numbers go first, so nobody may choose any. Raises ApiError 403."""
    if options.priority < tenant.min_priority:
        raise forbidden(f"With this API key priority must be at least {tenant.min_priority}", "priority")


async def _encode(model: TextModel, text: str) -> list[int]:
    return await _maybe_threaded(len(text), lambda: model.tokenizer.encode(text))


async def _maybe_threaded(size: int, work: Callable[[], T]) -> T:
    return await asyncio.to_thread(work) if size > _LONG_TEXT else work()


def _cache_salt(tenant: str, chosen: str) -> str:
    """Keeps the caches of tenants (those that share none) apart, and within a tenant those of different salts."""
    if not tenant and not chosen:
        return ""
    return hashlib.sha256(f"{len(tenant)}:{tenant}{chosen}".encode()).hexdigest()[:32]
