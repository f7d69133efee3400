"""Conversion between the frames of `transfer.proto` and the messages of `kv_transfer`.

A frame carries the checksum of all else in it: a flipped bit in a prompt or in a first token would be a wrong answer,
and no checksum of KV bytes would find it.
"""

from typing import TypeVar

import xxhash

from engine.request import Request, TokenLogprob
from kv_transfer import messages as m
from kv_transfer.references import BlockRef
from services.rpc import transfer_pb2 as pb
from services.worker.wire import (
    local_deadline,
    sampling_from_wire,
    sampling_to_wire,
    source_from_wire,
    source_to_wire,
)

Frame = TypeVar("Frame", pb.ReceiverFrame, pb.SenderFrame)


class DamagedFrame(Exception):
    """What came is not what the peer sent; nothing that follows on this stream can be trusted."""


def sealed(frame: Frame) -> Frame:
    """The frame with its checksum, to be sent."""
    frame.checksum = xxhash.xxh3_64_intdigest(frame.SerializeToString(deterministic=True))
    return frame


def opened(frame: Frame | None) -> Frame:
    """The frame as the peer sealed it. Raises DamagedFrame, also for None: gRPC's word for bytes that are no frame."""
    if frame is None:
        raise DamagedFrame("a frame cannot be decoded")
    checksum = frame.checksum
    frame.ClearField("checksum")
    if xxhash.xxh3_64_intdigest(frame.SerializeToString(deterministic=True)) != checksum:
        raise DamagedFrame("a frame's checksum is wrong")
    return frame


def to_receiver_frame(message: m.ToSender, now: float) -> pb.ReceiverFrame:
    """Frame for a message of the decode side. Deadlines travel as remaining seconds."""
    frame = pb.ReceiverFrame(transfer_id=message.transfer_id)
    match message:
        case m.Order():
            frame.order.CopyFrom(_order_to_wire(message, now))
        case m.Renew():
            frame.renew.lease_seconds = message.lease_seconds
        case m.Commit():
            frame.commit.SetInParent()
        case m.Abort():
            frame.abort.reason = message.reason
        case m.Switched():
            frame.switched.turn = message.turn
        case m.Lost():
            frame.lost.turn = message.turn
            frame.lost.reason = message.reason
    return frame


def from_receiver_frame(frame: pb.ReceiverFrame) -> m.ToSender | None:
    """Message of a frame; None for a hello or an unknown body. Raises DamagedFrame."""
    match frame.WhichOneof("body"):
        case "order":
            return _order_from_wire(frame.transfer_id, frame.order)
        case "renew":
            return m.Renew(frame.transfer_id, frame.renew.lease_seconds)
        case "commit":
            return m.Commit(frame.transfer_id)
        case "abort":
            return m.Abort(frame.transfer_id, frame.abort.reason)
        case "switched":
            return m.Switched(frame.transfer_id, frame.switched.turn)
        case "lost":
            return m.Lost(frame.transfer_id, frame.lost.turn, frame.lost.reason)
        case _:
            return None


def to_sender_frame(message: m.ToReceiver) -> pb.SenderFrame:
    """Frame for a message of the prefill side."""
    frame = pb.SenderFrame(transfer_id=message.transfer_id)
    match message:
        case m.Accepted():
            frame.accepted.lease_seconds = message.lease_seconds
        case m.FirstToken():
            first = frame.first_token
            first.token_id = message.token_id
            first.cached_tokens = message.cached_tokens
            first.queue_seconds, first.prefill_seconds = message.queue_seconds, message.prefill_seconds
            if message.logprob is not None:
                first.logprob = message.logprob.logprob
                for token_id, logprob in message.logprob.top:
                    first.top_logprobs.add(token_id=token_id, logprob=logprob)
        case m.Progress():
            frame.progress.bytes = message.bytes
            frame.progress.layers = message.layers
        case m.Done():
            frame.done.checksums.extend(message.checksums)
            frame.done.bytes = message.num_bytes
            frame.done.turn = message.turn
            frame.done.seconds_since_compute = message.seconds_since_compute
            frame.done.tier = message.tier
        case m.Switch():
            frame.switch.turn = message.turn
            frame.switch.connector = message.connector
            frame.switch.reason = message.reason
        case m.Failed():
            frame.failed.reason = message.reason
        case m.AbortAck():
            frame.abort_ack.SetInParent()
    return frame


def from_sender_frame(frame: pb.SenderFrame) -> m.ToReceiver | None:
    """Message of a frame; None for a hello or an unknown body."""
    transfer_id = frame.transfer_id
    match frame.WhichOneof("body"):
        case "accepted":
            return m.Accepted(transfer_id, frame.accepted.lease_seconds)
        case "first_token":
            first = frame.first_token
            logprob = None
            if first.HasField("logprob"):
                top = [(entry.token_id, entry.logprob) for entry in first.top_logprobs]
                logprob = TokenLogprob(first.token_id, first.logprob, top)
            seconds = first.queue_seconds, first.prefill_seconds
            return m.FirstToken(transfer_id, first.token_id, logprob, first.cached_tokens, *seconds)
        case "progress":
            return m.Progress(transfer_id, frame.progress.bytes, frame.progress.layers)
        case "done":
            done = frame.done
            sums = list(done.checksums)
            return m.Done(transfer_id, sums, done.bytes, done.turn, done.seconds_since_compute, done.tier)
        case "switch":
            return m.Switch(transfer_id, frame.switch.turn, frame.switch.connector, frame.switch.reason)
        case "failed":
            return m.Failed(transfer_id, frame.failed.reason)
        case "abort_ack":
            return m.AbortAck(transfer_id)
        case _:
            return None


def _order_to_wire(order: m.Order, now: float) -> pb.Order:
    request = order.request
    return pb.Order(
        request_id=request.request_id,
        attempt=request.attempt,
        prompt_token_ids=request.prompt_token_ids,
        output_token_ids=request.output_token_ids,
        sampling=sampling_to_wire(request.sampling),
        priority=request.priority,
        deadline_seconds=max(0.001, request.deadline - now),
        cache_salt=request.cache_salt,
        reply_to=order.reply_to,
        skip_blocks=order.skip_blocks,
        blocks=pb.BlockReferences(
            incarnations=[ref.incarnation for ref in order.blocks],
            block_ids=[ref.block_id for ref in order.blocks],
            generations=[ref.generation for ref in order.blocks],
            content_hashes=[ref.content_hash for ref in order.blocks],
        ),
        lease_seconds=order.lease_seconds,
        connector=order.connector,
        cached_only=order.cached_only,
        source=None if order.source is None else source_to_wire(order.source),
        traceparent=request.traceparent,
        block_hashes=request.block_hashes,
        tier=order.tier,
    )


def _order_from_wire(transfer_id: str, order: pb.Order) -> m.Order:
    request = Request(
        request_id=order.request_id,
        attempt=order.attempt,
        prompt_token_ids=list(order.prompt_token_ids),
        output_token_ids=list(order.output_token_ids),
        sampling=sampling_from_wire(order.sampling),
        priority=order.priority,
        deadline=local_deadline(order.deadline_seconds),
        cache_salt=order.cache_salt,
        traceparent=order.traceparent,
        block_hashes=list(order.block_hashes),
    )
    refs = order.blocks
    columns = refs.incarnations, refs.block_ids, refs.generations, refs.content_hashes
    if len({len(column) for column in columns}) > 1:
        raise DamagedFrame("columns of block references have different lengths")
    blocks = [BlockRef(*ref) for ref in zip(*columns, strict=True)]
    return m.Order(
        transfer_id=transfer_id,
        request=request,
        blocks=blocks,
        skip_blocks=order.skip_blocks,
        reply_to=order.reply_to,
        lease_seconds=order.lease_seconds,
        connector=order.connector,
        cached_only=order.cached_only,
        source=source_from_wire(order.source) if order.HasField("source") else None,
        tier=order.tier,
    )
