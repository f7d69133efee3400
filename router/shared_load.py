"""What several routers of a cluster tell each other: load that they booked and released, and what will be cached.

Each replica numbers its messages. A booking is kept under its attempt, whoever made it, so that a message can be taken
in twice, and a release may come from any replica. A message that is missed shows by the next one's number; then that
replica is asked to tell all that it has booked. The bookings of a replica that left are everybody's: they end by
release or lease like any.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import msgspec

from router.placer import Placer
from router.reservations import Reservation

_BEAT_SECONDS = 0.25  # without news: it is said that there are none
_ASK_SECONDS = 0.5  # between two questions for the same
_SILENCE_SECONDS = 10.0  # what was heard from a replica before says nothing any more
_LONGEST_LEASE = 7200.0  # seconds
_RELEASES = 2048  # latest ones: a booking of them that is told later was on its way
_HASHES = 512  # of a prompt's beginning that are told

Key = tuple[str, int]  # request id, attempt
Chain = tuple[str, Sequence[bytes]]  # layout, block hashes


class _Booking(msgspec.Struct, array_like=True):
    """Workers go by name, and times are relative, since rows and clocks are each replica's own."""

    key: Key
    decode: str
    prefill: str  # "": none
    load: Reservation
    chains: list[tuple[str, list[bytes]]]


class _Message(msgspec.Struct, array_like=True):
    replica: str
    sequence: int
    whole: bool  # `booked` is all that this replica has booked
    booked: list[_Booking]
    released: list[tuple[Key, bytes]]  # with what its gateway told; b"": nothing
    asked: list[str]  # replicas that shall tell all


@dataclass(slots=True)
class _Peer:
    heard: float  # monotonic seconds
    sequence: int = -1
    complete: bool = False  # everything that it booked is known
    asked: float = float("-inf")


_decoder = msgspec.msgpack.Decoder(_Message)
_encoder = msgspec.msgpack.Encoder()


class SharedLoad:
    """One replica's part. Bookings are taken from and put into its `placer`."""

    def __init__(self, replica: str, placer: Placer) -> None:
        self._replica = replica
        self._placer = placer
        self._peers: dict[str, _Peer] = {}
        self._sequence = 0
        self._told = float("-inf")
        self._whole = False  # the next message tells all
        self._booked: dict[Key, Sequence[Chain]] = {}  # since the last message
        self._released: list[tuple[Key, bytes]] = []
        self._over: dict[Key, None] = {}  # released lately, here or elsewhere

    def join(self, replica: str, now: float) -> None:
        """Another replica is there."""
        if replica != self._replica and replica not in self._peers:
            self._peers[replica] = _Peer(heard=now)
            self._whole = True

    def leave(self, replica: str) -> None:
        """Another replica is gone."""
        if self._peers.pop(replica, None) is not None:
            self._placer.reservations.adopt(replica)
        if not self._peers:
            self._forget()

    def booked(self, key: Key, chains: Iterable[Chain]) -> None:
        """An attempt was booked here; it had these hashes."""
        if self._peers:
            self._booked[key] = [(layout, hashes[:_HASHES]) for layout, hashes in chains]

    def released(self, key: Key, report: bytes = b"") -> None:
        """An attempt's end was told here, whoever booked it. `report` is handed to the others, once at most."""
        self._remember(key)  # a replica that is not known yet may have heard of the booking
        if self._peers:
            self._booked.pop(key, None)
            self._released.append((key, report))

    def __len__(self) -> int:
        """Other replicas."""
        return len(self._peers)

    @property
    def news(self) -> bool:
        """Whether there is anything to tell that should not wait for the next beat."""
        return bool(self._booked or self._released or self._whole) and bool(self._peers)

    def message(self, now: float) -> bytes | None:
        """What to tell the others now. None: nothing, or nobody is there."""
        asked = [name for name, peer in self._peers.items() if not peer.complete and now - peer.asked >= _ASK_SECONDS]
        if not self._peers or not (self.news or asked or now - self._told >= _BEAT_SECONDS):
            return None
        for name in asked:
            self._peers[name].asked = now
        reservations = self._placer.reservations
        keys = [key for key, _ in reservations.told_by("")] if self._whole else list(self._booked)
        found = [(key, reservations.get(*key)) for key in keys]
        booked = [self._booking(key, load, now) for key, load in found if load is not None]
        again = [(key, b"") for key in self._over] if self._whole else []
        released = self._released + again  # reports first: they are compared with what is booked
        self._sequence += 1
        message = _Message(self._replica, self._sequence, self._whole, booked, released, asked)
        self._told = now
        self._forget()
        return _encoder.encode(message)

    def lost(self) -> None:
        """The latest message may not have been heard: the next one tells all."""
        self._whole = bool(self._peers)

    def take_in(self, data: bytes, now: float) -> list[tuple[Reservation | None, bytes]]:
        """Applies a message of any replica. Raises msgspec.MsgspecError if it is none.

        Returns reports of attempts that ended, with what was booked of them as far as that was known.
        """
        message = _decoder.decode(data)
        peer = self._peers.get(message.replica)
        if peer is None:  # this one, one that left, or one that will be asked when it has joined
            return []
        peer.heard = now
        self._whole |= self._replica in message.asked
        if message.sequence <= peer.sequence:
            return []
        peer.complete = message.whole or (peer.complete and message.sequence == peer.sequence + 1)
        peer.sequence = message.sequence
        reservations = self._placer.reservations
        ended = []
        for key, report in message.released:
            reservation, is_known = reservations.release(*key), key in self._over
            self._remember(key)
            if report and not is_known:  # else the gateway told several routers, this one among them
                ended.append((reservation, report))
        if message.whole:
            told = {booking.key for booking in message.booked}
            self._release(key for key, _ in reservations.told_by(message.replica) if key not in told)
        for booking in message.booked:
            if booking.key not in self._over:
                self._book(booking, message.replica, now)
        return ended

    def staleness(self, now: float) -> float:
        """Seconds since the word of the replica that has been silent for the longest time; 0: there is no other."""
        return max((now - peer.heard for peer in self._peers.values()), default=0.0)

    def tick(self, now: float) -> None:
        """Now and then: what a silent replica told ends, as its releases are not heard."""
        for name, peer in self._peers.items():
            if peer.sequence >= 0 and now - peer.heard > _SILENCE_SECONDS:
                self._release(key for key, _ in self._placer.reservations.told_by(name))
                peer.sequence, peer.complete = -1, False

    def _booking(self, key: Key, load: Reservation, now: float) -> _Booking:
        names, prefill = self._placer.fleet.table["worker"], load.prefill
        return _Booking(
            key,
            names[load.decode].decode(),
            "" if prefill is None else names[prefill].decode(),
            replace(load, booked=0.0, expires=load.expires - now),
            [(layout, list(hashes)) for layout, hashes in self._booked.get(key, ())],
        )

    def _book(self, booking: _Booking, replica: str, now: float) -> None:
        fleet, load = self._placer.fleet, booking.load
        decode, prefill = fleet.row(booking.decode), fleet.row(booking.prefill)
        if decode is None:
            return
        lease = max(0.0, min(_LONGEST_LEASE, load.expires))
        load = replace(load, decode=decode, prefill=prefill, booked=now, expires=now + lease, told_by=replica)
        self._placer.reservations.reserve(*booking.key, load)
        self._placer.expect({decode, decode if prefill is None else prefill}, booking.chains, now)

    def _remember(self, key: Key) -> None:
        self._over[key] = None
        if len(self._over) > _RELEASES:
            del self._over[next(iter(self._over))]

    def _release(self, keys: Iterable[Key]) -> None:
        for key in keys:
            self._placer.reservations.release(*key)

    def _forget(self) -> None:
        self._booked, self._released, self._whole = {}, [], False
