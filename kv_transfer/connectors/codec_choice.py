"""Whether frames to one receiver are packed: when packing them and sending less is quicker than sending them plain.

What the link does is read from the kernel: how many bytes the receiver has acknowledged, and how long there were any to
send. Only times count in which there nearly always were: in others a packet that waits for an acknowledgement, or for a
busy core, would make a fast link look slow. But whatever has gone faster than was thought shows a faster link, so one
that has become fast is noticed, packed frames or not.

What the codec does is measured on the very payloads: on each that is packed, and while none is, on one now and then, if
the link is slow enough for the answer to matter. It is timed by the core's clock: who waits for a core, or for the
interpreter, does so packed or not. The link is shared by all streams, so its speed is compared with what they can pack
together, one a core.
"""

import math
import socket
import struct
import threading
import time
from collections.abc import Callable, Collection, Iterable

from kv_transfer.connectors.codec import Bytes, pack

_ACKED_OFFSET, _BUSY_OFFSET = 120, 168  # of u64 in Linux' struct tcp_info: tcpi_bytes_acked, tcpi_busy_time in us
_TCP_INFO_BYTES = 176
_LOOK_SECONDS = 0.05  # between two looks at the link
_BUSY = 0.8  # of the time between them, to count
_ENOUGH_BYTES, _ENOUGH_SECONDS = 1 << 20, 0.25  # of sending, before the link is judged; either will do
_HALF_LIFE_BYTES = 4 << 20  # what was measured so many bytes ago counts half
_TRIALS, _TRIAL_SECONDS = 3, 5.0  # frames at first; then one in so long
_WORTH = 0.95  # of the plain time, to begin; once begun, any gain will do

Sent = tuple[int, float]  # bytes that were acknowledged, seconds in which there were any to send


def sent_on(connection: socket.socket) -> Sent:
    """On this connection so far; nothing where the kernel does not tell."""
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    except OSError:
        return 0, 0.0
    if len(info) < _TCP_INFO_BYTES:
        return 0, 0.0
    (acked,), (busy,) = struct.unpack_from("=Q", info, _ACKED_OFFSET), struct.unpack_from("=Q", info, _BUSY_OFFSET)
    return acked, busy / 1e6


class Rate:
    """Bytes a second, and what became of the bytes: lately, older ones counting less and less."""

    def __init__(self) -> None:
        self.bytes = self.seconds = self.packed = 0.0

    def add(self, num_bytes: int, seconds: float, packed: int = 0) -> None:
        """So many bytes took so long, and were `packed` bytes then."""
        old = 0.5 ** (num_bytes / _HALF_LIFE_BYTES)
        self.bytes = old * self.bytes + num_bytes
        self.seconds = old * self.seconds + seconds
        self.packed = old * self.packed + packed

    @property
    def speed(self) -> float:
        """Bytes a second."""
        return self.bytes / self.seconds if self.seconds else math.inf

    @property
    def ratio(self) -> float:
        """Of packed bytes to all."""
        return self.packed / self.bytes if self.bytes else 1.0


class CodecChoice:
    """Of all streams to one receiver, which may use `codecs`; so many of them pack at once. Any thread may call."""

    def __init__(self, codecs: Collection[int], at_once: int) -> None:
        self._codecs = codecs
        self._at_once = at_once
        self.link = Rate()
        self.codec = Rate()
        self.in_use = False
        self._lock = threading.Lock()
        self._looked = time.monotonic()
        self._trial_due = 0.0  # monotonic seconds
        self._trials_left = _TRIALS

    def pack(self, payload: Bytes, codec: int) -> list[memoryview] | None:
        """The payload packed, in pieces; None if it is to go as it is."""
        in_use = self.in_use
        if codec not in self._codecs or not (in_use or self._is_trial_due()):
            return None
        started = time.thread_time()
        pieces = pack(payload, codec)
        seconds = (time.thread_time() - started) / self._at_once
        size = sum(map(len, pieces))
        with self._lock:
            self.codec.add(payload.size, seconds, min(size, payload.size))
            self._decide()
        return pieces if in_use and size < payload.size else None

    def look(self, streams: Iterable[Callable[[], Sent]]) -> None:
        """Measures the link, if it is time to. `streams` say what each has sent since it was asked before."""
        now = time.monotonic()
        with self._lock:
            passed = now - self._looked
            if not self._codecs or passed < _LOOK_SECONDS:
                return
            self._looked = now
            found = [ask() for ask in streams]
            # The streams share the link, and as a rule all are busy at the same time.
            total, busy = sum(num_bytes for num_bytes, _ in found), max(seconds for _, seconds in found)
            if busy >= _BUSY * passed or total > busy * self.link.speed:
                self.link.add(total, busy)
                self._decide()

    def __str__(self) -> str:
        """For people."""
        if not self._codecs:
            return ""
        if not self._is_link_known():
            return "link not measured yet"
        found = f"link {self.link.speed / 1e6:,.0f} MB/s"
        if self.codec.bytes:
            found += f", codec {self.codec.speed / 1e6:,.0f} MB/s, packs to {self.codec.ratio:.0%}"
        return f"{found}: {'packed' if self.in_use else 'plain'}"

    def _is_link_known(self) -> bool:
        return self.link.bytes >= _ENOUGH_BYTES or self.link.seconds >= _ENOUGH_SECONDS

    def _is_trial_due(self) -> bool:
        """Whether to pack a payload for the measurement alone."""
        now = time.monotonic()
        with self._lock:
            # With a link as fast as the codec there is nothing to gain; twice, as what was measured varies.
            if not self._is_link_known() or self.link.speed > 2 * self.codec.speed:
                return False
            if self._trials_left:
                self._trials_left -= 1
            elif now < self._trial_due:
                return False
            self._trial_due = now + _TRIAL_SECONDS
            return True

    def _decide(self) -> None:
        """Under the lock."""
        if not self._is_link_known() or not self.codec.bytes:
            return
        plain = 1 / self.link.speed  # seconds a byte
        packed = 1 / self.codec.speed + self.codec.ratio * plain
        self.in_use = packed < (1.0 if self.in_use else _WORTH) * plain
