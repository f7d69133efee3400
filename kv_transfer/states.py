"""The states of the two sides of a transfer, and what moves them. docs/transfers.md shows these tables."""

from enum import Enum


class ReceiverState(Enum):
    """Where a transfer stands for the decode side."""

    RESERVED = "reserved"  # blocks are granted, the order is out
    PREFILLING = "prefilling"  # the writer has taken it
    LANDING = "landing"  # bytes, or the first token, have come
    LOST = "lost"  # bytes were lost; waits for the writer to take another connector
    FENCING = "fencing"  # the writer has another connector; waits until the one before is shut out
    VERIFYING = "verifying"  # all was written, and is compared
    ABORTING = "aborting"  # blocks are set aside until the writer has stopped or is shut out
    COMMITTED = "committed"
    FAILED = "failed"
    ABORTED = "aborted"
    FENCED = "fenced"


class ReceiverEvent(Enum):
    """What moves the decode side."""

    ACCEPTED = "order accepted"
    BYTES = "bytes or first token"
    DONE = "all is written"
    LOST = "bytes lost, another connector left"
    SWITCH = "writer takes another connector"
    FENCED = "writer shut out"
    VERIFIED = "checksums equal"
    REFUSED = "checksums differ, or no first token"
    STOPPED = "writer has stopped"
    GIVEN_UP = "not wanted, peer lost, lease or deadline over"


class SenderState(Enum):
    """Where a transfer stands for the prefill side."""

    PREFILLING = "prefilling"  # computes and pushes
    SWITCHING = "switching"  # the same, but nothing is pushed until the receiver has shut out the connector before
    PUSHED = "pushed"  # all bytes are out; waits for the receiver's word
    STOPPING = "stopping"  # waits until no write is under way
    COMMITTED = "committed"
    STOPPED = "stopped"


class SenderEvent(Enum):
    """What moves the prefill side."""

    PUSHED = "last byte out"
    SWITCH = "connector given up for another"
    SWITCHED = "connector before shut out"
    COMMIT = "commit"
    GIVEN_UP = "abort, failure, peer lost, lease over"
    STOPPED = "no write under way"


_R, _RE, _S, _SE = ReceiverState, ReceiverEvent, SenderState, SenderEvent

_WAITS = {
    _RE.ACCEPTED: _R.PREFILLING,
    _RE.BYTES: _R.LANDING,
    _RE.DONE: _R.VERIFYING,
    _RE.LOST: _R.LOST,
    _RE.SWITCH: _R.FENCING,
    _RE.STOPPED: _R.FAILED,
    _RE.GIVEN_UP: _R.ABORTING,
}

# What is not in a state's row does not move it. States with an empty row are final.
RECEIVER: dict[ReceiverState, dict[ReceiverEvent, ReceiverState]] = {
    _R.RESERVED: _WAITS,
    _R.PREFILLING: {event: state for event, state in _WAITS.items() if event is not _RE.ACCEPTED},
    _R.LANDING: {event: state for event, state in _WAITS.items() if event not in (_RE.ACCEPTED, _RE.BYTES)},
    _R.LOST: {_RE.SWITCH: _R.FENCING, _RE.STOPPED: _R.FAILED, _RE.GIVEN_UP: _R.ABORTING},
    _R.FENCING: {_RE.FENCED: _R.PREFILLING, _RE.STOPPED: _R.FAILED, _RE.GIVEN_UP: _R.ABORTING},
    _R.VERIFYING: {
        _RE.VERIFIED: _R.COMMITTED,
        _RE.REFUSED: _R.FAILED,
        _RE.LOST: _R.LOST,
        _RE.GIVEN_UP: _R.ABORTED,
    },
    _R.ABORTING: {_RE.STOPPED: _R.ABORTED, _RE.FENCED: _R.FENCED},
    _R.COMMITTED: {},
    _R.FAILED: {},
    _R.ABORTED: {},
    _R.FENCED: {},
}

SENDER: dict[SenderState, dict[SenderEvent, SenderState]] = {
    _S.PREFILLING: {_SE.PUSHED: _S.PUSHED, _SE.SWITCH: _S.SWITCHING, _SE.GIVEN_UP: _S.STOPPING},
    _S.SWITCHING: {_SE.SWITCHED: _S.PREFILLING, _SE.GIVEN_UP: _S.STOPPING},
    _S.PUSHED: {_SE.COMMIT: _S.COMMITTED, _SE.SWITCH: _S.SWITCHING, _SE.GIVEN_UP: _S.STOPPING},
    _S.STOPPING: {_SE.STOPPED: _S.STOPPED},
    _S.COMMITTED: {},
    _S.STOPPED: {},
}
