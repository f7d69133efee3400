"""What the two sides of a KV transfer tell each other. `transfer_id` is `request_id/attempt`, of a fetch `.../fetch`.

Any of these may come late, twice, out of order or never; the state machines in `receiver` and `sender` cope.
"""

import msgspec

from engine.request import Request, TokenLogprob
from kv_transfer.references import BlockRef

FETCH = "/fetch"  # ends the ids of fetches, and no id of a request: who holds a prefix may have the request as well


class PrefixSource(msgspec.Struct, frozen=True):
    """A worker in whose cache the first `tokens` of a prompt are believed to be, or the KV service.

    `tier`: of `engine.request.TIERS`, what the KV service has no further away than there; empty: it is a worker.
    """

    name: str
    incarnation: str
    address: str  # host:port
    tokens: int
    tier: str = ""


class Order(msgspec.Struct, frozen=True, tag=True):
    """Receiver to sender: compute this prompt and write its KV into these blocks.

    `blocks[i]` is the destination of prompt block `skip_blocks + i`; the blocks before are cached at the receiver. They
    are blocks of the receiver's size, and where it has several ranks there is a page of each for every block, in turn.
    Bytes are taken from `connector`, until the writer asks for a switch.

    `cached_only`: a fetch. Nothing is computed; the writer sends as many leading blocks as it has cached, or refuses.
    Its request may name the blocks by `block_hashes`, if both sides lay them out alike. The KV service looks no further
    than in `tier`; empty: in all.
    `source`: where the writer may fetch leading blocks itself, before it computes.
    """

    transfer_id: str
    request: Request
    blocks: list[BlockRef]
    skip_blocks: int
    reply_to: str
    lease_seconds: float
    connector: str = ""
    cached_only: bool = False
    source: PrefixSource | None = None
    tier: str = ""

    @property
    def num_tokens(self) -> int:
        """Tokens whose KV is moved."""
        return len(self.request.prompt_token_ids) + len(self.request.output_token_ids)


class Renew(msgspec.Struct, frozen=True, tag=True):
    """Receiver to sender: still wanted."""

    transfer_id: str
    lease_seconds: float


class Commit(msgspec.Struct, frozen=True, tag=True):
    """Receiver to sender, positive acknowledgement: the bytes are verified, the source blocks may be freed."""

    transfer_id: str


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Receiver to sender: stop writing and say so."""

    transfer_id: str
    reason: str


class Switched(msgspec.Struct, frozen=True, tag=True):
    """Receiver to sender: the connector before is shut out, bytes are taken from that of this turn."""

    transfer_id: str
    turn: int


class Lost(msgspec.Struct, frozen=True, tag=True):
    """Receiver to sender: the bytes of this turn did not all arrive whole. Send them over another connector."""

    transfer_id: str
    turn: int
    reason: str


class Accepted(msgspec.Struct, frozen=True, tag=True):
    """Sender to receiver: the order is queued."""

    transfer_id: str
    lease_seconds: float


class FirstToken(msgspec.Struct, frozen=True, tag=True):
    """Sender to receiver: the first token, usually before the last byte of KV.

    The prompt waited for `queue_seconds` after the order and was computed in `prefill_seconds` then.
    """

    transfer_id: str
    token_id: int
    logprob: TokenLogprob | None
    cached_tokens: int
    queue_seconds: float = 0.0
    prefill_seconds: float = 0.0


class Progress(msgspec.Struct, frozen=True, tag=True):
    """Sender to receiver: bytes were written; renews the receiver's lease."""

    transfer_id: str
    bytes: int
    layers: int


class Switch(msgspec.Struct, frozen=True, tag=True):
    """Sender to receiver: nothing is written any more as before; may all be written again over this connector?

    Turns count the connectors of a transfer, from 0 for the one of the order.
    """

    transfer_id: str
    turn: int
    connector: str
    reason: str


class Done(msgspec.Struct, frozen=True, tag=True):
    """Sender to receiver: all is written; the sum of each page (`checksums`), in the order of `Order.blocks`.

    Of a fetch perhaps of the leading ones alone: of no other was anything written.

    `num_bytes` were pushed in this turn, counting twice what went twice: so much must land before anything is compared.
    `seconds_since_compute`: since the prompt's last layer was computed. `tier`: the furthest that the KV service waited
    for; empty: a worker sent it.
    """

    transfer_id: str
    checksums: list[int]
    num_bytes: int
    turn: int = 0
    seconds_since_compute: float = 0.0
    tier: str = ""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """Sender to receiver, negative acknowledgement: it did not work out, and nothing will be written any more."""

    transfer_id: str
    reason: str


class AbortAck(msgspec.Struct, frozen=True, tag=True):
    """Sender to receiver: nothing will be written any more."""

    transfer_id: str


ToSender = Order | Renew | Commit | Abort | Switched | Lost
ToReceiver = Accepted | FirstToken | Progress | Switch | Done | Failed | AbortAck
