"""Transfers one rule at a time: each example is a rule that keeps blocks safe."""

import itertools

import pytest
from msgspec.structs import replace

from engine.request import Request, SamplingParams
from kv_transfer import receiver as rx
from kv_transfer import sender as tx
from kv_transfer.messages import Abort, AbortAck, Accepted, Commit, Done, Failed, FirstToken, Order, Progress, Renew
from kv_transfer.references import BlockRef
from kv_transfer.states import ReceiverState
from kv_transfer.transfers import SenderTransfers

LEASE = 5.0
TOMBSTONE = 60.0
LAYERS = 2


def make_order(transfer_id: str, blocks: list[BlockRef], lease: float = LEASE) -> Order:
    request = Request(request_id=transfer_id, prompt_token_ids=[1, 2, 3], sampling=SamplingParams())
    return Order(transfer_id, request, blocks, 0, "tcp://127.0.0.1:1", lease)


# The same, pinned down in examples

REF = BlockRef("d0", 0, 1)
ORDER = make_order("r/0", [REF])


def test_good_transfer_joins_once_and_frees_the_source() -> None:
    receiver = rx.ReceiverTransfer(ORDER, deadline=100)
    assert receiver.start(0) == [rx.Send(ORDER)]
    sender = tx.SenderTransfer(ORDER, 0)
    assert sender.start(0) == [tx.Reply(Accepted("r/0", LEASE)), tx.Begin()]
    (first,) = sender.first_token(5, None, 16)
    (done,) = sender.pushed([9], 1, 1)
    assert isinstance(first, tx.Reply) and isinstance(done, tx.Reply)
    assert receiver.on_message(first.message, 1) == []
    assert receiver.on_message(done.message, 1) == [rx.Verify(Done("r/0", [9], 1))]
    assert receiver.on_message(done.message, 1) == []
    assert receiver.verified(True, 1) == [rx.Send(Commit("r/0")), rx.Join(5, None, 16)]
    assert receiver.verified(True, 1) == [] and receiver.on_message(done.message, 2) == []
    assert sender.on_message(Commit("r/0"), 2) == [tx.Release()]
    assert sender.on_message(Commit("r/0"), 2) == []


def test_a_fetch_needs_no_first_token_and_may_bring_less_than_was_ordered() -> None:
    order = replace(ORDER, blocks=[REF, BlockRef("d0", 1, 1)], cached_only=True)
    receiver, sender = rx.ReceiverTransfer(order, deadline=100), tx.SenderTransfer(order, 0)
    assert receiver.start(0) == [rx.Send(order)]
    sender.start(0)
    (done,) = sender.pushed([9], 1, 1)
    assert isinstance(done, tx.Reply)
    assert receiver.on_message(done.message, 1) == [rx.Verify(Done("r/0", [9], 1))]
    assert receiver.verified(True, 1) == [rx.Send(Commit("r/0")), rx.JoinPrefix(1)]
    assert sender.on_message(Commit("r/0"), 2) == [tx.Release()]
    damaged = rx.ReceiverTransfer(order, deadline=100)
    damaged.start(0)
    damaged.on_message(done.message, 1)
    assert damaged.verified(False, 1)[-1] == rx.Recompute(rx.DAMAGED)


def test_damaged_bytes_are_recomputed_and_told() -> None:
    receiver = rx.ReceiverTransfer(ORDER, deadline=100)
    receiver.start(0)
    receiver.on_message(FirstToken("r/0", 5, None, 0), 0)
    receiver.on_message(Done("r/0", [9], 1), 0)
    actions = receiver.verified(False, 0)
    assert [type(action) for action in actions] == [rx.Send, rx.Recompute]
    assert isinstance(actions[0], rx.Send) and isinstance(actions[0].message, Abort)


def test_prefill_worker_lost_after_its_last_byte_costs_nothing() -> None:
    receiver = rx.ReceiverTransfer(ORDER, deadline=100)
    receiver.start(0)
    receiver.on_message(FirstToken("r/0", 5, None, 0), 0)
    receiver.on_message(Done("r/0", [9], 1), 0)
    assert receiver.on_peer_lost(1) == []
    assert receiver.on_message(AbortAck("r/0"), 1) == [] and receiver.on_message(Failed("r/0", "x"), 1) == []
    assert rx.Join(5, None, 0) in receiver.verified(True, 1)


@pytest.mark.parametrize("last", [AbortAck("r/0"), Failed("r/0", "x"), Done("r/0", [1], 1)])
def test_blocks_stay_aside_until_the_writer_says_that_it_stopped(last: AbortAck | Failed | Done) -> None:
    receiver = rx.ReceiverTransfer(ORDER, deadline=100)
    receiver.start(0)
    assert receiver.abort("client gone", 1) == [rx.Detach("client gone", False), rx.Send(Abort("r/0", "client gone"))]
    assert receiver.on_message(Progress("r/0", 1, 1), 2) == []
    assert receiver.on_peer_lost(2) == []
    assert [type(action) for action in receiver.on_tick(50)] == [rx.Send]  # asks again
    assert receiver.on_message(last, 51) == [rx.ReleaseBlocks()]
    assert receiver.on_message(last, 51) == [] and receiver.on_fenced(51) == []


def test_prefill_worker_lost_in_the_middle_may_still_write() -> None:
    receiver = rx.ReceiverTransfer(ORDER, deadline=100)
    receiver.start(0)
    actions = receiver.on_peer_lost(1)
    assert [type(action) for action in actions] == [rx.Detach, rx.Send]
    assert isinstance(actions[0], rx.Detach) and actions[0].recompute
    assert receiver.on_fenced(2) == [rx.ReleaseBlocks()]


def test_failure_is_told_only_after_the_push_stopped() -> None:
    sender = tx.SenderTransfer(ORDER, 0)
    sender.start(0)
    assert sender.failed("no memory") == [tx.StopPushing()]
    assert sender.on_peer_lost() == []
    assert sender.stopped() == [tx.Reply(Failed("r/0", "no memory")), tx.Release()]
    lost = tx.SenderTransfer(ORDER, 0)
    assert lost.on_peer_lost() == [tx.StopPushing()]


def test_silence_and_the_deadline_both_end_the_wait() -> None:
    silent = rx.ReceiverTransfer(ORDER, deadline=100)
    silent.start(0)
    assert [type(action) for action in silent.on_tick(LEASE)] == [rx.Detach, rx.Send]
    slow = rx.ReceiverTransfer(ORDER, deadline=8)
    slow.start(0)
    slow.on_message(Accepted("r/0", LEASE), 4)
    assert all(isinstance(action, rx.Send) for action in slow.on_tick(7.9))
    assert isinstance(slow.on_tick(8)[0], rx.Detach)
    unverified = rx.ReceiverTransfer(ORDER, deadline=8)
    unverified.start(0)
    unverified.on_message(Done("r/0", [1], 1), 1)
    assert [type(action) for action in unverified.on_tick(8)] == [rx.Detach, rx.Send, rx.ReleaseBlocks]


def test_long_queue_keeps_the_lease_alive_without_a_byte() -> None:
    receiver, sender = rx.ReceiverTransfer(ORDER, deadline=1000), tx.SenderTransfer(ORDER, 0)
    receiver.start(0)
    for second in range(1, 100):
        for action in receiver.on_tick(second):
            assert isinstance(action, rx.Send) and isinstance(action.message, Renew)
            for reply in sender.on_message(action.message, second):
                assert isinstance(reply, tx.Reply)
                receiver.on_message(reply.message, second)
        assert sender.on_tick(second) == []
    assert receiver.state is ReceiverState.PREFILLING


def test_abort_is_acknowledged_only_after_the_push_stopped() -> None:
    sender = tx.SenderTransfer(ORDER, 0)
    sender.start(0)
    assert sender.on_message(Abort("r/0", "x"), 1) == [tx.StopPushing()]
    assert sender.on_message(Abort("r/0", "x"), 1) == [] and sender.on_tick(100) == []
    assert sender.first_token(1, None, 0) == sender.pushed([1], 1, 1) == sender.failed("x") == []
    assert sender.stopped() == [tx.Reply(AbortAck("r/0")), tx.Release()]
    assert sender.stopped() == []
    assert sender.on_message(Abort("r/0", "x"), 2) == [tx.Reply(AbortAck("r/0"))]


@pytest.mark.parametrize("lease", [float("inf"), float("nan"), -1.0, 0.0, 1e9])
def test_no_lease_lasts_for_ever(lease: float) -> None:
    sender = tx.SenderTransfer(make_order("r/0", [REF], lease), 0)
    sender.on_message(Renew("r/0", lease), 0)
    assert sender.on_tick(0.1) == [tx.StopPushing()]


def test_commit_lost_is_asked_for_again() -> None:
    sender = tx.SenderTransfer(ORDER, 0)
    sender.first_token(5, None, 0)
    sender.pushed([9], 1, 0)
    assert sender.on_tick(0.1) == []
    messages = [action.message for action in sender.on_tick(2) if isinstance(action, tx.Reply)]
    assert [type(message) for message in messages] == [FirstToken, Done]
    assert rx.answer_unknown(messages[1]) == [rx.Send(Abort("r/0", "not under way"))]


def test_order_after_its_abort_is_refused() -> None:
    table = SenderTransfers(tombstone_seconds=10)
    assert table.on_message("d0", Abort("r/0", "x"), 0) == (None, [tx.Reply(AbortAck("r/0"))])
    assert table.on_message("d0", ORDER, 1) == (None, [tx.Reply(AbortAck("r/0"))])
    assert table.on_message("d1", ORDER, 1)[0] is not None  # another receiver's, with the same id


@pytest.mark.parametrize("order", list(itertools.permutations(["commit", "abort", "expiry"])))
def test_ends_in_any_order_free_once(order: tuple[str, ...]) -> None:
    table = SenderTransfers()
    machine, _ = table.on_message("d0", ORDER, 0)
    assert machine is not None
    machine.pushed([9], 1, 0)
    released = 0
    for end in order:
        if end == "expiry":
            actions = [action for _, _, due in table.on_tick(LEASE) for action in due]
        else:
            message = Commit("r/0") if end == "commit" else Abort("r/0", "x")
            actions = table.on_message("d0", message, 1)[1]
        released += sum(isinstance(action, tx.Release) for action in actions + machine.stopped())
        table.forget_closed("d0", machine, 1)
    assert released == 1 and len(table) == 0
    assert table.on_message("d0", ORDER, 2) == (None, [tx.Reply(AbortAck("r/0"))])


def test_table_is_bounded() -> None:
    table = SenderTransfers(max_transfers=2, max_tombstones=5)
    for i in range(10):
        table.on_message("d0", make_order(f"r{i}/0", [REF]), 0)
        table.on_message("d0", Abort(f"x{i}/0", "x"), 0)
    assert len(table) == 2 and table.num_tombstones == 5
    table.on_tick(60)
    assert table.num_tombstones == 0
    _, actions = table.on_message("d0", make_order("more/0", [REF]), 0)
    assert isinstance(actions[0], tx.Reply) and isinstance(actions[0].message, Failed)
    assert table.on_message("d0", Renew("unknown/0", 5), 0) == table.on_message("d0", Commit("u/0"), 0) == (None, [])
