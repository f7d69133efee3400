"""A transfer goes from one connector to the next: rules of the two machines, and of the choice, in examples."""

import time

import pytest

from engine.request import Request, SamplingParams
from kv_transfer import receiver as rx
from kv_transfer import sender as tx
from kv_transfer.connectors import selection
from kv_transfer.connectors.base import ConnectorCounters, ConnectorError, SenderConnector
from kv_transfer.connectors.selection import Selection
from kv_transfer.messages import Abort, Accepted, Done, Failed, FirstToken, Lost, Order, Renew, Switch, Switched
from kv_transfer.references import BlockRef

LEASE = 6.0
REQUEST = Request(request_id="r/0", prompt_token_ids=[1, 2, 3], sampling=SamplingParams())
ORDER = Order("r/0", REQUEST, [BlockRef("d0", 0, 1)], 0, "tcp://127.0.0.1:1", LEASE, "a")
SWITCH = Switch("r/0", 1, "b", "a failed")


def ordered(*spare: str) -> rx.ReceiverTransfer:
    receiver = rx.ReceiverTransfer(ORDER, deadline=100, spare=("a", *spare))
    receiver.start(0)
    return receiver


def computing() -> tx.SenderTransfer:
    sender = tx.SenderTransfer(ORDER, 0)
    sender.start(0)
    return sender


def done(turn: int) -> Done:
    return Done("r/0", [9], 1, turn)


def test_bytes_are_expected_on_the_next_connector_only_when_the_one_before_is_shut_out() -> None:
    receiver = ordered("b")
    assert receiver.on_message(SWITCH, 1) == [] and receiver.to_be_fenced
    assert receiver.on_message(done(0), 1) == [] and receiver.on_message(done(1), 1) == []
    assert receiver.on_message(SWITCH, 2) == []  # again: it waits still
    assert receiver.on_fenced(2) == [rx.Expect("b"), rx.Send(Switched("r/0", 1))]
    assert not receiver.to_be_fenced
    assert receiver.on_message(SWITCH, 3) == [rx.Send(Switched("r/0", 1))]  # the answer was lost
    assert receiver.on_message(done(0), 3) == []  # a late word about the connector before
    assert [type(action) for action in receiver.on_message(done(1), 3)] == [rx.Verify]


def test_late_end_of_a_connector_given_up_frees_no_block() -> None:
    receiver = ordered("b")
    receiver.on_message(SWITCH, 1)
    receiver.on_fenced(1)
    receiver.abort("client gone", 2)
    assert receiver.on_message(done(0), 2) == []
    assert receiver.on_message(done(1), 2) == [rx.ReleaseBlocks()]


def test_a_connector_is_used_once_and_must_be_offered() -> None:
    for connector in ("a", "c"):
        receiver = ordered("b")
        actions = receiver.on_message(Switch("r/0", 1, connector, "x"), 1)
        assert isinstance(actions[0], rx.Detach) and actions[0].recompute
        assert isinstance(actions[1], rx.Send) and isinstance(actions[1].message, Abort)
    receiver = ordered("b", "c")
    receiver.on_message(SWITCH, 1)
    receiver.on_fenced(1)
    assert receiver.on_message(Switch("r/0", 3, "c", "x"), 2) == []  # not the next turn
    assert isinstance(receiver.on_message(Switch("r/0", 2, "b", "x"), 2)[0], rx.Detach)


def test_the_receiver_asks_for_another_connector_only_if_there_is_one() -> None:
    alone = ordered()
    assert alone.lost("a frame was lost", 1) == []
    alone.on_message(done(0), 1)
    assert isinstance(alone.verified(False, 1)[1], rx.Recompute)
    receiver = ordered("b")
    lost = rx.Send(Lost("r/0", 0, "a frame was lost"))
    assert receiver.lost("a frame was lost", 1) == [lost]
    assert receiver.lost("another", 1) == [] and receiver.on_message(done(0), 1) == []
    assert receiver.on_tick(1 + LEASE / 3) == [rx.Send(Renew("r/0", LEASE)), lost]
    assert receiver.on_message(SWITCH, 4) == []
    receiver.on_fenced(4)
    receiver.on_message(done(1), 5)
    assert isinstance(receiver.verified(False, 5)[1], rx.Recompute)  # the last one


def test_a_writer_that_never_switches_is_given_up() -> None:
    receiver = ordered("b")
    receiver.lost("a frame was lost", 1)
    assert isinstance(receiver.on_tick(1 + LEASE)[0], rx.Detach)
    fencing = ordered("b")
    fencing.on_message(SWITCH, 1)
    assert isinstance(fencing.on_tick(1 + LEASE)[0], rx.Detach)
    assert fencing.on_fenced(8) == [rx.ReleaseBlocks()]
    gone = ordered("b")
    gone.on_message(SWITCH, 1)
    assert gone.on_message(Failed("r/0", "no connector works"), 2) == [rx.Recompute("no connector works")]


def test_nothing_is_pushed_again_before_the_receiver_is_ready() -> None:
    sender = computing()
    assert sender.switch("b", "a failed", 1) == [tx.Reply(SWITCH)]
    assert sender.pushed([9], 1, 1) == [] and sender.on_message(Lost("r/0", 1, "x"), 1) == []
    assert sender.on_tick(1 + LEASE / 4) == []
    assert sender.on_tick(1 + LEASE / 3) == [tx.Reply(SWITCH)]
    assert sender.first_token(5, None, 0) == [tx.Reply(FirstToken("r/0", 5, None, 0))]
    assert sender.on_message(Renew("r/0", LEASE), 4) == [tx.Reply(Accepted("r/0", LEASE))]
    assert sender.on_message(Switched("r/0", 0), 4) == []
    assert sender.on_message(Switched("r/0", 1), 4) == [tx.PushAgain()]
    assert sender.on_message(Switched("r/0", 1), 4) == []
    (reply,) = sender.pushed([9], 1, 5)
    assert isinstance(reply, tx.Reply) and isinstance(reply.message, Done) and reply.message.turn == 1


def test_lost_bytes_are_sent_again_also_after_the_last_one() -> None:
    sender = computing()
    sender.pushed([9], 1, 1)
    assert sender.on_message(Lost("r/0", 1, "x"), 2) == []
    assert sender.on_message(Lost("r/0", 0, "x"), 2) == [tx.GiveUpConnector("x")]
    assert isinstance(sender.switch("b", "x", 2)[0], tx.Reply)
    assert sender.on_message(Lost("r/0", 0, "x"), 3) == []  # it came twice
    assert sender.failed("no other") == [tx.StopPushing()]
    assert sender.stopped() == [tx.Reply(Failed("r/0", "no other")), tx.Release()]


# Which connector


class Opened(SenderConnector):
    """Counts what is closed; bytes are no matter here."""

    def __init__(self) -> None:
        self.counters = ConnectorCounters()
        self.closed = 0

    def push(self, *args: object) -> int:
        raise NotImplementedError

    def flush(self, transfer_id: str) -> None:
        raise NotImplementedError

    def stop(self, transfer_id: str) -> None:
        raise NotImplementedError

    def close(self) -> None:
        self.closed += 1


class Offers:
    def __init__(self, *broken: str) -> None:
        self.broken = set(broken)
        self.opened: list[tuple[str, Opened]] = []

    def open(self, kind: str, description: bytes) -> SenderConnector:
        assert description == kind.encode()
        if kind in self.broken:
            raise ConnectorError(f"no {kind} today")
        self.opened.append((kind, Opened()))
        return self.opened[-1][1]

    def select(self, forced: str | None = None) -> Selection:
        return Selection([(kind, kind.encode()) for kind in "abc"], self.open, forced)


def test_the_next_one_is_used_by_all_and_the_better_one_tried_after_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "FIRST_PAUSE_SECONDS", 0.2)
    offers = Offers()
    chosen = offers.select()
    first = chosen.current
    second = chosen.fall_back(first, "its socket died", {"a"})
    assert second.kind == "b" and "its socket died" in second.reason and chosen.current is second
    assert chosen.fall_back(first, "another transfer saw it too", {"a"}).connector is second.connector
    assert [kind for kind, _ in offers.opened] == ["a", "b"]
    assert not chosen.is_better_due()
    assert chosen.take_given_up([first.connector]) == []  # a transfer still ends on it
    assert chosen.take_given_up([]) == [first.connector] and chosen.take_given_up([]) == []
    offers.broken.add("a")
    time.sleep(0.25)
    assert chosen.is_better_due()
    chosen.try_better()
    assert chosen.current.kind == "b" and not chosen.is_better_due()
    offers.broken.clear()
    time.sleep(0.25)
    assert not chosen.is_better_due()  # the pause is longer now
    time.sleep(0.25)
    assert chosen.is_better_due()
    chosen.try_better()
    assert chosen.current.kind == "a" and chosen.current.connector is not first.connector
    chosen.close()
    assert [connector.closed for _, connector in offers.opened] == [0, 1, 1]  # the first was handed out to be closed


def test_without_another_one_it_stays_in_use_and_all_reasons_are_told() -> None:
    offers = Offers("b")
    chosen = offers.select()
    first = chosen.current
    with pytest.raises(ConnectorError, match="a: x; b: no b today; c: this transfer"):
        chosen.fall_back(first, "x", {"a", "c"})
    assert chosen.current is first and chosen.take_given_up([]) == []
    assert chosen.fall_back(first, "x", {"a"}).kind == "c"
    forced = offers.select("a")
    with pytest.raises(ConnectorError, match="c: not used, as a is forced"):
        forced.fall_back(forced.current, "x", {"a"})
    assert forced.current.kind == "a"
    forced.close()
    with pytest.raises(ConnectorError, match="closed"):
        forced.fall_back(forced.current, "x", ())
    chosen.close()
