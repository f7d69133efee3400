"""Conversion between protobuf messages and the engine's structs, bounds checked."""

import math
import time

from engine.request import TIERS, Request, SamplingParams
from kv_transfer.messages import PrefixSource
from services.rpc import router_pb2, worker_pb2
from services.tracing import traceparent

_MAX_SECONDS = 86_400.0


def sampling_from_wire(message: worker_pb2.Sampling) -> SamplingParams:
    """Sampling parameters of a request."""
    return SamplingParams(
        max_tokens=message.max_tokens,
        min_tokens=message.min_tokens,
        temperature=message.temperature,
        top_k=message.top_k,
        top_p=message.top_p,
        min_p=message.min_p,
        repetition_penalty=message.repetition_penalty,
        frequency_penalty=message.frequency_penalty,
        presence_penalty=message.presence_penalty,
        logit_bias=dict(message.logit_bias),
        seed=message.seed,
        stop_token_ids=tuple(message.stop_token_ids),
        eos_token_ids=tuple(message.eos_token_ids),
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
    )


def sampling_to_wire(sampling: SamplingParams) -> worker_pb2.Sampling:
    """Inverse of `sampling_from_wire`."""
    return worker_pb2.Sampling(
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty,
        logit_bias=sampling.logit_bias,
        seed=sampling.seed,
        stop_token_ids=sampling.stop_token_ids,
        eos_token_ids=sampling.eos_token_ids,
        logprobs=sampling.logprobs,
        prompt_logprobs=sampling.prompt_logprobs,
    )


def source_from_wire(message: router_pb2.PrefixSource) -> PrefixSource:
    """Where leading blocks of a prompt may be fetched."""
    worker = message.worker
    tier = message.tier if message.tier in ("", *TIERS) else TIERS[-1]  # of a router newer than this
    return PrefixSource(worker.name, worker.incarnation, worker.address, message.tokens, tier)


def source_to_wire(source: PrefixSource) -> router_pb2.PrefixSource:
    """Inverse of `source_from_wire`."""
    worker = router_pb2.Endpoint(name=source.name, incarnation=source.incarnation, address=source.address)
    return router_pb2.PrefixSource(worker=worker, tokens=source.tokens, tier=source.tier)


def local_deadline(remaining_seconds: float) -> float:
    """time.monotonic() of this process at which `remaining_seconds` from now are over; 0 or nonsense means a day."""
    if not math.isfinite(remaining_seconds) or remaining_seconds <= 0:
        remaining_seconds = _MAX_SECONDS
    return time.monotonic() + min(remaining_seconds, _MAX_SECONDS)


def sequence_key(request_id: str, attempt: int) -> str:
    """Name of one attempt of a request: the engine's request id and the transfer id."""
    return f"{request_id}/{attempt}"


def request_from_submit(message: worker_pb2.SubmitRequest) -> Request:
    """The engine request of the Submit being served; its id is the sequence key, so attempts never mix."""
    return Request(
        request_id=sequence_key(message.request_id, message.attempt),
        attempt=message.attempt,
        prompt_token_ids=list(message.prompt_token_ids),
        output_token_ids=list(message.output_token_ids),
        sampling=sampling_from_wire(message.sampling),
        priority=message.priority,
        deadline=local_deadline(message.deadline_seconds),
        cache_salt=message.cache_salt,
        traceparent=traceparent.get(),
    )
