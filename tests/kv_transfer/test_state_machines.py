"""The two state machines against each other, over a network that loses, doubles and reorders, with processes that die.

The world below is a receiver's memory, one sender, and the messages under way. A write into a block whose owner is not
the transfer that writes is the failure all of this is about; the rules try to provoke it.
"""

import itertools
import os
from dataclasses import dataclass, field

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.request import Request, SamplingParams
from kv_transfer import receiver as rx
from kv_transfer import sender as tx
from kv_transfer.messages import Done, Order
from kv_transfer.references import BlockRef
from kv_transfer.states import ReceiverState, SenderState
from kv_transfer.transfers import SenderTransfers

LEASE = 5.0
LAYERS = 2
BLOCKS = 4
PER_TRANSFER = 2
TOMBSTONE = 60.0
CONNECTORS = ("a", "b", "c")
STREAM = TOMBSTONE / 2  # nothing stays longer under way
OFTEN = st.booleans()
RARELY = st.sampled_from([False, False, False, True])


def make_order(transfer_id: str, blocks: list[BlockRef], cached_only: bool) -> Order:
    request = Request(request_id=transfer_id, prompt_token_ids=[1, 2, 3], sampling=SamplingParams())
    return Order(transfer_id, request, blocks, 0, "tcp://127.0.0.1:1", LEASE, CONNECTORS[0], cached_only)


@dataclass
class Receiving:
    machine: rx.ReceiverTransfer
    blocks: list[BlockRef]
    stream: int
    verifying: Done | None = None
    verified: int = 0
    joins: int = 0
    connector: str = CONNECTORS[0]
    outcomes: list[str] = field(default_factory=list)


@dataclass
class Sending:
    machine: tx.SenderTransfer
    peer: str
    pushed: int = 0  # layers
    writing: bool = False
    stopping: bool = False
    source_held: bool = False
    failed: bool = False
    connector: str = CONNECTORS[0]
    giving_up: bool = False  # the connector has failed
    waiting: bool = False  # for the receiver's word about the next one
    tried: set[str] = field(default_factory=lambda: {CONNECTORS[0]})

    @property
    def blocks(self) -> list[BlockRef]:
        """Those that it writes: of a fetch it has only the first."""
        order = self.machine.order
        return order.blocks[:1] if order.cached_only else order.blocks


class World(RuleBasedStateMachine):
    """`revocable`: the connector can shut one transfer out, as both connectors can; else only death is a fence."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 100.0
        self.ids = itertools.count()
        self.incarnations = itertools.count()
        self.stream = 0
        self.connected = True
        self.to_sender: list[tuple[float, object]] = []
        self.to_receiver: list[tuple[float, object]] = []
        self.boot_receiver()
        self.boot_sender()

    @initialize(revocable=st.booleans())
    def choose_connector(self, revocable: bool) -> None:
        self.revocable = revocable

    def boot_receiver(self) -> None:
        self.incarnation = f"d{next(self.incarnations)}"
        self.owner: list[str | None] = [None] * BLOCKS
        self.generation = [0] * BLOCKS
        self.content: list[dict[int, str]] = [{} for _ in range(BLOCKS)]
        self.allowed: dict[tuple[str, int], int] = {}  # the connectors' tables
        # Connector, transfer, blocks, layer: may come again.
        self.frames: list[tuple[str, str, list[BlockRef], int]] = []
        self.receiving: dict[str, Receiving] = {}

    def boot_sender(self) -> None:
        self.table = SenderTransfers(tombstone_seconds=TOMBSTONE)
        self.sending: dict[tuple[str, str], Sending] = {}

    # What the worker does with actions

    def carry_out_rx(self, transfer: Receiving, actions: list[rx.Action]) -> None:
        key = transfer.machine.transfer_id
        if transfer.machine.closed:
            self.shut_out(transfer)
        for action in actions:
            match action:
                case rx.Send(message):
                    if self.connected:
                        self.to_sender.append((self.now, message))
                case rx.Verify(done):
                    assert transfer.verifying is None, "verified twice"
                    transfer.verified = 0
                    transfer.verifying = done
                case rx.Join() | rx.JoinPrefix():
                    transfer.joins += 1
                    transfer.outcomes.append("join")
                    assert isinstance(action, rx.JoinPrefix) == transfer.machine.order.cached_only
                    num_pages = action.num_pages if isinstance(action, rx.JoinPrefix) else len(transfer.blocks)
                    assert num_pages
                    for ref in transfer.blocks[:num_pages]:
                        landed = self.content[ref.block_id]
                        assert landed == {layer: key for layer in range(LAYERS)}, "joined without all its bytes"
                    for ref in transfer.blocks:
                        self.owner[ref.block_id] = "sequence " + key
                case rx.Recompute():
                    transfer.outcomes.append("recompute")
                    for ref in transfer.blocks:
                        self.owner[ref.block_id] = "sequence " + key
                case rx.Detach(_, recompute):
                    transfer.outcomes.append("recompute" if recompute else "abort")
                case rx.Expect(connector):
                    assert connector == transfer.machine.connector
                    for ref in transfer.blocks:
                        self.allowed[connector, ref.block_id] = ref.generation
                    transfer.connector = connector
                case rx.ReleaseBlocks():
                    for ref in transfer.blocks:
                        assert self.owner[ref.block_id] == key, "released twice"
                        self.owner[ref.block_id] = None
        assert len(transfer.outcomes) <= 1, transfer.outcomes

    def shut_out(self, transfer: Receiving) -> None:
        for ref in transfer.blocks:
            if self.allowed.get((transfer.connector, ref.block_id)) == ref.generation:
                del self.allowed[transfer.connector, ref.block_id]

    def fenced(self, transfer: Receiving) -> bool:
        key = (self.incarnation, transfer.machine.transfer_id)
        sending = self.sending.get(key)
        if self.revocable:
            self.shut_out(transfer)
            return sending is None or not sending.writing or sending.connector != transfer.connector
        return transfer.stream == -1  # its sender was seen dead

    def carry_out_tx(self, sending: Sending | None, actions: list[tx.SenderAction]) -> None:
        for action in actions:
            match action:
                case tx.Reply(message):
                    if self.connected:
                        self.to_receiver.append((self.now, message))
                case tx.Begin():
                    assert sending is not None
                    sending.source_held = True
                case tx.StopPushing():
                    assert sending is not None
                    sending.stopping = True
                case tx.GiveUpConnector():
                    assert sending is not None
                    sending.giving_up = not sending.waiting
                case tx.PushAgain():
                    assert sending is not None and not sending.writing
                    sending.waiting, sending.pushed = False, 0
                case tx.Release():
                    assert sending is not None and sending.source_held, "released twice"
                    sending.source_held = False

    def settle_sender(self) -> None:
        for key, sending in list(self.sending.items()):
            self.table.forget_closed(sending.peer, sending.machine, self.now)
            if sending.machine.closed:
                assert not sending.writing, "closed in the middle of a write"
                assert not sending.source_held, "source blocks leaked"
                del self.sending[key]

    # Requests

    @precondition(lambda self: self.owner.count(None) >= PER_TRANSFER)
    @rule(fetches=OFTEN)
    def start(self, fetches: bool) -> None:
        free = [block for block in range(BLOCKS) if self.owner[block] is None]
        key = f"r{next(self.ids)}/0"
        refs = []
        for block in free[:PER_TRANSFER]:
            self.owner[block] = key
            self.generation[block] += 1
            self.content[block] = {}
            self.allowed[CONNECTORS[0], block] = self.generation[block]
            refs.append(BlockRef(self.incarnation, block, self.generation[block]))
        machine = rx.ReceiverTransfer(make_order(key, refs, fetches), deadline=self.now + 40, spare=CONNECTORS)
        transfer = self.receiving[key] = Receiving(machine, refs, self.stream)
        self.carry_out_rx(transfer, machine.start(self.now))

    @precondition(lambda self: self.under_way())
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        transfer = data.draw(st.sampled_from(self.under_way()))
        self.carry_out_rx(transfer, transfer.machine.abort("client gone", self.now))

    def under_way(self) -> list[Receiving]:
        return [t for t in self.receiving.values() if not t.machine.closed]

    def sequences(self) -> list[str]:
        return sorted({owner for owner in self.owner if owner and owner.startswith("sequence")})

    @precondition(lambda self: self.sequences())
    @rule(data=st.data())
    def finish_sequence(self, data: st.DataObject) -> None:
        self.free_sequence(data.draw(st.sampled_from(self.sequences())))

    def free_sequence(self, owner: str) -> None:
        self.owner = [None if held == owner else held for held in self.owner]

    def to_verify(self) -> list[Receiving]:
        return [transfer for transfer in self.receiving.values() if transfer.verifying and transfer.verified < 2]

    @precondition(lambda self: self.to_verify())
    @rule(data=st.data(), damaged=RARELY)
    def verify(self, data: st.DataObject, damaged: bool) -> None:
        """Also after the transfer has ended otherwise, and twice: the thread that compares may be late."""
        self.verify_one(data.draw(st.sampled_from(self.to_verify())), damaged)

    def verify_one(self, transfer: Receiving, damaged: bool = False) -> None:
        transfer.verified += 1
        key = transfer.machine.transfer_id
        if damaged and transfer.machine.state is ReceiverState.VERIFYING:
            self.content[transfer.blocks[0].block_id].pop(0, None)
        assert transfer.verifying is not None
        written = transfer.blocks[: len(transfer.verifying.checksums)]
        ok = all(self.content[ref.block_id] == {i: key for i in range(LAYERS)} for ref in written)
        if not ok:
            transfer.verifying = None
        self.carry_out_rx(transfer, transfer.machine.verified(ok, self.now))

    # The prefill worker

    @precondition(lambda self: self.sending)
    @rule(data=st.data())
    def work(self, data: st.DataObject) -> None:
        """One step of one transfer; a write begins in one step and ends in a later one."""
        sending = data.draw(st.sampled_from(list(self.sending.values())))
        if sending.writing:
            self.end_push_of(sending)
        else:
            self.begin_push_of(sending)
            self.go_on_with(sending)

    @precondition(lambda self: any(sending.writing for sending in self.sending.values()))
    @rule()
    def fail_while_writing(self) -> None:
        """The engine gives the request up while a push is under way."""
        sending = next(sending for sending in self.sending.values() if sending.writing)
        self.carry_out_tx(sending, sending.machine.failed("no memory"))

    def begin_push_of(self, sending: Sending) -> None:
        if sending.writing or sending.stopping or sending.pushed == LAYERS or sending.failed:
            return
        if sending.giving_up or sending.waiting:
            return
        if self.revocable and not self.may_write(sending):
            sending.failed = True
        else:
            sending.writing = True

    def may_write(self, sending: Sending) -> bool:
        return sending.peer == self.incarnation and all(
            self.allowed.get((sending.connector, ref.block_id)) == ref.generation for ref in sending.blocks
        )

    def end_push_of(self, sending: Sending) -> None:
        if not sending.writing:
            return
        key = sending.machine.transfer_id
        if sending.peer == self.incarnation:  # else it is the memory of a process that is gone
            for ref in sending.blocks:
                assert self.owner[ref.block_id] == key, f"{key} wrote into a block of {self.owner[ref.block_id]}"
                self.content[ref.block_id][sending.pushed] = key
            self.frames.append((sending.connector, key, sending.blocks, sending.pushed))
        sending.writing = False
        sending.pushed += 1
        self.carry_out_tx(sending, sending.machine.progress(1, sending.pushed))

    def go_on_with(self, sending: Sending) -> None:
        """What the worker does between pushes: stops, fails, sends the first token, ends."""
        if sending.writing:
            return
        if sending.stopping:
            self.carry_out_tx(sending, sending.machine.stopped())
        elif sending.giving_up:
            self.switch(sending)
        elif sending.failed:
            self.carry_out_tx(sending, sending.machine.failed("push failed"))
        elif sending.pushed == LAYERS and not sending.waiting and sending.machine.state is SenderState.PREFILLING:
            if not sending.machine.order.cached_only:
                self.carry_out_tx(sending, sending.machine.first_token(7, None, 0))
            self.carry_out_tx(sending, sending.machine.pushed([1] * len(sending.blocks), 1, self.now))
        self.settle_sender()

    # Connectors that fail

    @precondition(lambda self: self.sending)
    @rule(data=st.data())
    def fail_connector(self, data: st.DataObject) -> None:
        sending = data.draw(st.sampled_from(list(self.sending.values())))
        sending.giving_up = not sending.waiting

    def switch(self, sending: Sending) -> None:
        """To the next one, or there is none."""
        sending.giving_up = False
        machine = sending.machine
        following = [connector for connector in CONNECTORS if connector not in sending.tried]
        if not following:
            self.carry_out_tx(sending, machine.failed("no connector works"))
            return
        sending.connector, sending.waiting = following[0], True
        sending.tried.add(following[0])
        self.carry_out_tx(sending, machine.switch(following[0], "it failed", self.now))

    @precondition(lambda self: self.under_way())
    @rule(data=st.data())
    def lose_bytes(self, data: st.DataObject) -> None:
        """The receiver's connector says that a frame was lost."""
        transfer = data.draw(st.sampled_from(self.under_way()))
        self.carry_out_rx(transfer, transfer.machine.lost("a frame was lost", self.now))

    @precondition(lambda self: self.revocable and self.frames)
    @rule(data=st.data())
    def land_late(self, data: st.DataObject) -> None:
        """A frame comes again, from wherever it was kept; a connector writes what its table allows."""
        connector, key, blocks, layer = data.draw(st.sampled_from(self.frames))
        for ref in blocks:
            if self.allowed.get((connector, ref.block_id)) == ref.generation:
                assert self.owner[ref.block_id] == key, f"{key} wrote into a block of {self.owner[ref.block_id]}"
                assert self.receiving[key].connector == connector, "written over a connector that was given up"
                self.content[ref.block_id][layer] = key

    @precondition(lambda self: self.under_way())
    @rule(rounds=st.integers(1, 5))
    def run_quietly(self, rounds: int) -> None:
        """Nothing special happens: gets the world to where something special can."""
        for _ in range(rounds):
            for sending in list(self.sending.values()):
                self.begin_push_of(sending)
                self.end_push_of(sending)
                self.go_on_with(sending)
            for _ in range(len(self.to_sender)):
                self.give_sender(0, False)
            for _ in range(len(self.to_receiver)):
                self.give_receiver(0, False)

    # The network

    @precondition(lambda self: self.to_sender or self.to_receiver)
    @rule(data=st.data(), in_order=OFTEN, again=RARELY)
    def deliver(self, data: st.DataObject, in_order: bool, again: bool) -> None:
        """Any message; `again`: it stays under way, too."""
        give, bag = data.draw(
            st.sampled_from(
                [
                    (give, bag)
                    for give, bag in ((self.give_sender, self.to_sender), (self.give_receiver, self.to_receiver))
                    if bag
                ]
            )
        )
        give(0 if in_order else data.draw(st.integers(0, len(bag) - 1)), again)

    def give_sender(self, index: int, again: bool) -> None:
        message = self.to_sender[index][1] if again else self.to_sender.pop(index)[1]
        transfer, actions = self.table.on_message(self.incarnation, message, self.now)  # type: ignore[arg-type]
        sending = None
        if transfer is not None:
            key = (self.incarnation, transfer.transfer_id)
            sending = self.sending.setdefault(key, Sending(transfer, self.incarnation))
            assert sending.machine is transfer, "an order was carried out twice at once"
        self.carry_out_tx(sending, actions)
        self.settle_sender()

    def give_receiver(self, index: int, again: bool) -> None:
        message = self.to_receiver[index][1] if again else self.to_receiver.pop(index)[1]
        transfer = self.receiving.get(message.transfer_id)  # type: ignore[attr-defined]
        if transfer is None or transfer.machine.closed:
            self.to_sender += [(self.now, send.message) for send in rx.answer_unknown(message)]  # type: ignore[arg-type]
        if transfer is not None:
            self.carry_out_rx(transfer, transfer.machine.on_message(message, self.now))  # type: ignore[arg-type]
            if transfer.machine.state is ReceiverState.FENCING and self.fenced(transfer):
                self.carry_out_rx(transfer, transfer.machine.on_fenced(self.now))

    @precondition(lambda self: self.to_sender or self.to_receiver)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        bag = data.draw(st.sampled_from([bag for bag in (self.to_sender, self.to_receiver) if bag]))
        bag.pop(data.draw(st.integers(0, len(bag) - 1)))

    @precondition(lambda self: self.connected and self.under_way())
    @rule(disaster=st.sampled_from(["stream", "stream", "sender", "receiver", "receiver, unseen"]))
    def strike(self, disaster: str) -> None:
        match disaster:
            case "stream":
                self.break_stream()
            case "sender":
                self.kill_sender()
            case _:
                self.kill_receiver(seen=disaster == "receiver")

    def break_stream(self) -> None:
        """Both sides see it. What was under way is gone with the stream."""
        self.connected = False
        self.to_sender.clear()
        self.to_receiver.clear()
        for transfer in self.receiving.values():
            self.carry_out_rx(transfer, transfer.machine.on_peer_lost(self.now))
        for machine, actions in self.table.on_peer_lost(self.incarnation):
            self.carry_out_tx(self.sending[(self.incarnation, machine.transfer_id)], actions)

    @precondition(lambda self: not self.connected)
    @rule()
    def connect(self) -> None:
        self.connected = True

    def kill_sender(self) -> None:
        self.to_sender.clear()
        self.to_receiver.clear()
        self.boot_sender()
        for transfer in self.receiving.values():
            transfer.stream = -1
            self.carry_out_rx(transfer, transfer.machine.on_peer_lost(self.now))

    def kill_receiver(self, *, seen: bool) -> None:
        old = self.incarnation
        self.to_sender.clear()
        self.to_receiver.clear()
        self.boot_receiver()
        for machine, actions in self.table.on_peer_lost(old) if seen else ():
            self.carry_out_tx(self.sending[(old, machine.transfer_id)], actions)

    @rule(seconds=st.sampled_from([0.1, 0.1, 2.0, 2.0, 6.0]))
    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.to_sender = [entry for entry in self.to_sender if entry[0] > self.now - STREAM]
        self.to_receiver = [entry for entry in self.to_receiver if entry[0] > self.now - STREAM]
        for transfer in self.receiving.values():
            self.carry_out_rx(transfer, transfer.machine.on_tick(self.now))
            if transfer.machine.to_be_fenced and self.fenced(transfer):
                self.carry_out_rx(transfer, transfer.machine.on_fenced(self.now))
        for peer, machine, actions in self.table.on_tick(self.now):
            self.carry_out_tx(self.sending[(peer, machine.transfer_id)], actions)
        self.settle_sender()

    # What always holds, and what holds in the end

    @invariant()
    def blocks_have_owners(self) -> None:
        for key, transfer in self.receiving.items():
            if not transfer.machine.closed:
                assert all(self.owner[ref.block_id] == key for ref in transfer.blocks)
            assert transfer.joins <= 1

    def teardown(self) -> None:
        """The network heals and nothing new comes: everything ends, with nothing left over."""
        self.connected = True
        for _ in range(60):
            self.run_quietly(1)
            for transfer in self.to_verify():
                self.verify_one(transfer)
            self.tick(1.0)
        states = [transfer.machine.state for transfer in self.receiving.values() if not transfer.machine.closed]
        assert not states
        assert not self.sending and len(self.table) == 0
        for owner in {held for held in self.owner if held}:
            assert owner.startswith("sequence"), f"block leaked by {owner}"
            self.free_sequence(owner)
        assert self.owner == [None] * BLOCKS
        self.tick(TOMBSTONE + 1)
        assert self.table.num_tombstones == 0
        assert all(len(transfer.outcomes) == 1 for transfer in self.receiving.values()), "a request without an end"


World.TestCase.settings = settings(
    max_examples=int(os.environ.get("TRANSFER_EXAMPLES", "150")),
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestWorld = World.TestCase
