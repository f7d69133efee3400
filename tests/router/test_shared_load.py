"""Several routers that tell each other what they book, over a way that loses, repeats and is cut."""

from collections.abc import Iterable

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from engine.hashing import block_hashes
from router.placer import Placer
from router.shared_load import SharedLoad
from router.snapshot import Ask

NAMES = ("a", "b", "c")
CHAIN = block_hashes(range(1600), 16, b"root")
ASK = Ask(prompt_tokens=1601, max_tokens=10)
LEASE = 60.0


class Replica:
    """A router; its workers stand in rows of its own."""

    def __init__(self, name: str, others: Iterable[str] = NAMES, now: float = 0.0) -> None:
        self.name = name
        self.placer = Placer(policy="prefix", local_prefill_tokens=32, fetch_tokens=0, seed=1)
        self.workers = ["d0", "d1", "p0"]
        for worker in sorted(self.workers, reverse=name == "b"):
            fleet = self.placer.fleet
            decodes = worker.startswith("d")
            fleet.set(fleet.join(worker), ready=True, decodes=decodes, prefills=not decodes, layout=fleet.layout("l"))
            fleet.set(fleet.join(worker), block_size=16)
        self.shared = SharedLoad(name, self.placer)
        for other in others:
            self.shared.join(other, now)

    def place(self, key: tuple[str, int], now: float, lease: float = LEASE, excluded: Iterable[str] = ()) -> str:
        chains = [("l", CHAIN)]
        placed = self.placer.place(key, ASK, chains, excluded, now=now, lease=lease)
        self.shared.booked(key, chains)
        return bytes(self.placer.fleet.table["worker"][placed.decision.decode]).decode()

    def release(self, key: tuple[str, int], report: bytes = b"") -> None:
        self.placer.reservations.release(*key)
        self.shared.released(key, report)

    def load(self) -> dict[str, tuple[int, float, float]]:
        """Booked requests and tokens of each worker."""
        rows = {worker: self.placer.fleet.row(worker) for worker in self.workers}
        columns = self.placer.fleet.table[["requests", "prefill_tokens", "decode_tokens"]]
        return {worker: tuple(columns[row].tolist()) for worker, row in rows.items()}

    @property
    def booked(self) -> int:
        return len(self.placer.reservations)


def exchange(*replicas: Replica, now: float, rounds: int = 3) -> None:
    """Everybody hears everybody."""
    for _ in range(rounds):
        for teller in replicas:
            message = teller.shared.message(now)
            for hearer in replicas:
                if message is not None:
                    hearer.shared.take_in(message, now)


def three() -> list[Replica]:
    replicas = [Replica(name) for name in NAMES]
    exchange(*replicas, now=0.0)
    return replicas


def test_what_one_books_and_releases_all_have_in_their_columns() -> None:
    a, b, c = three()
    a.place(("x", 0), 0.0)
    b.place(("y", 0), 0.0)
    exchange(a, b, c, now=0.01)
    assert a.load() == b.load() == c.load()
    assert sum(requests for requests, *_ in c.load().values()) == 4  # two attempts, each on two workers
    b.release(("y", 0))
    c.release(("x", 0))  # whoever is told
    exchange(a, b, c, now=0.02)
    assert a.booked == b.booked == c.booked == 0
    assert set(a.load().values()) == {(0, 0.0, 0.0)}


def test_what_another_routed_attracts() -> None:
    a, b, _ = three()
    first = a.place(("x", 0), 0.0, excluded=["d1"])
    exchange(a, b, now=0.01)
    assert (first, b.place(("y", 0), 0.02)) == ("d0", "d0")
    row = b.placer.fleet.row("d1")
    assert row is not None
    b.placer.reservations.release("x", 0)
    b.placer.tick(100.0)
    placed = b.placer.place(("z", 0), ASK, [("l", CHAIN)], (), now=100.0, lease=1.0)
    assert not placed.snapshot.recalled_blocks.any()  # for its time only


def test_a_lost_message_is_missed_and_all_is_told_once() -> None:
    a, b, _ = three()
    a.place(("x", 0), 0.0)
    assert a.shared.message(0.01) is not None  # nobody hears it
    a.place(("y", 0), 0.02)
    message = a.shared.message(0.03)
    assert message is not None
    b.shared.take_in(message, 0.03)
    assert b.booked == 1
    exchange(a, b, now=1.0, rounds=1)  # b asks
    exchange(a, b, now=1.0, rounds=1)
    assert b.load() == a.load() and b.booked == 2
    assert a.shared.message(1.01) is None and b.shared.message(1.01) is None


def test_a_release_that_got_lost_ends_with_the_next_whole_message() -> None:
    a, b, _ = three()
    a.place(("x", 0), 0.0)
    exchange(a, b, now=0.01)
    a.release(("x", 0))
    a.shared.message(0.02)
    a.shared.lost()  # the store did not take it
    assert b.booked == 1
    exchange(a, b, now=0.03)
    assert b.booked == 0


def test_an_end_that_a_router_without_others_was_told_reaches_those_that_join() -> None:
    a, b = Replica("a"), Replica("b", others=())
    a.place(("x", 0), 0.0)
    b.release(("x", 0))  # its gateway sees it already; it sees no other router yet
    b.shared.join("a", 0.01)
    exchange(a, b, now=0.02)
    assert a.booked == b.booked == 0


def test_the_same_message_twice_or_late_changes_nothing() -> None:
    a, b, _ = three()
    a.place(("x", 0), 0.0)
    first = a.shared.message(0.01)
    a.release(("x", 0))
    second = a.shared.message(0.02)
    assert first is not None and second is not None
    for message in (first, first, second, first, second):
        b.shared.take_in(message, 0.03)
    assert b.booked == 0


def test_who_joins_hears_everything_also_of_those_that_are_gone() -> None:
    a, b, c = three()
    a.place(("x", 0), 0.0)
    b.place(("y", 0), 0.0)
    exchange(a, b, c, now=0.01)
    for survivor in (b, c):
        survivor.shared.leave("a")
    assert b.booked == 2
    joining = Replica("d", ["b", "c"])
    for survivor in (b, c):
        survivor.shared.join("d", 0.1)
    exchange(b, c, joining, now=0.1)
    assert joining.load() == b.load() == c.load()
    c.release(("x", 0))
    exchange(b, c, joining, now=0.2)
    assert [each.booked for each in (b, c, joining)] == [1, 1, 1]


def test_bookings_end_by_lease_everywhere() -> None:
    a, b, _ = three()
    a.place(("x", 0), 0.0, lease=5.0)
    exchange(a, b, now=1.0)
    b.placer.tick(4.9)
    assert b.booked == 1
    b.placer.tick(6.1)
    assert b.booked == 0


def test_a_silent_replica_counts_no_more_and_is_asked_when_it_is_back() -> None:
    a, b, _ = three()
    a.place(("x", 0), 0.0)
    exchange(a, b, now=0.01)
    assert b.shared.staleness(3.0) == pytest.approx(3.0, abs=0.1)
    b.shared.tick(5.0)
    assert b.booked == 1
    b.shared.tick(11.0)
    assert b.booked == 0
    exchange(a, b, now=12.0)
    assert b.load() == a.load() and b.booked == 1


def test_a_booking_that_was_on_its_way_when_its_end_was_told_does_not_come_back() -> None:
    a, b, c = three()
    a.place(("x", 0), 0.0)
    late = a.shared.message(0.01)
    assert late is not None
    c.release(("x", 0))
    end = c.shared.message(0.02)
    assert end is not None
    for message in (end, late):
        for hearer in (a, b, c):
            hearer.shared.take_in(message, 0.03)
    assert [each.booked for each in (a, b, c)] == [0, 0, 0]


def test_what_a_gateway_told_reaches_the_others_once() -> None:
    a, b, c = three()
    a.place(("x", 0), 0.0)
    exchange(a, b, now=0.01)
    a.release(("x", 0), b"report")
    message = a.shared.message(0.02)
    assert message is not None
    ((known, report),) = b.shared.take_in(message, 0.03)
    assert known is not None and (known.told_by, report) == ("a", b"report")
    assert b.shared.take_in(message, 0.03) == []
    assert [(known, report) for known, report in c.shared.take_in(message, 0.03)] == [(None, b"report")]


def test_what_a_gateway_told_two_routers_counts_once_at_each() -> None:
    a, b, _ = three()
    a.release(("x", 0), b"report")
    b.release(("x", 0), b"report")
    message = a.shared.message(0.02)
    assert message is not None and b.shared.take_in(message, 0.02) == []


def test_a_report_in_a_message_that_tells_all_comes_with_what_was_booked() -> None:
    a, b, _ = three()
    a.place(("x", 0), 0.0)
    exchange(a, b, now=0.01)
    a.release(("x", 0), b"report")
    a.shared.lost()
    message = a.shared.message(0.02)
    assert message is not None
    ((known, report),) = b.shared.take_in(message, 0.02)
    assert known is not None and report == b"report"
    assert b.booked == 0


def test_a_retry_at_another_router_is_one_booking() -> None:
    """Both booked the attempt, as the first one's answer got lost; one release ends it everywhere."""
    a, b, c = three()
    a.place(("x", 0), 0.0)
    b.place(("x", 0), 0.0)
    exchange(a, b, c, now=0.01)
    assert [each.booked for each in (a, b, c)] == [1, 1, 1]
    b.release(("x", 0))
    exchange(a, b, c, now=0.02)
    assert [each.booked for each in (a, b, c)] == [0, 0, 0]
    assert set(a.load().values()) == set(b.load().values()) == {(0, 0.0, 0.0)}


def test_workers_that_another_does_not_know_are_left_out() -> None:
    a, b, _ = three()
    b.placer.leave("p0")
    b.workers.remove("p0")
    a.place(("x", 0), 0.0)
    exchange(a, b, now=0.01)
    assert b.load()["d0"][0] + b.load()["d1"][0] == 1
    for worker in ("d0", "d1"):
        b.placer.leave(worker)
    a.place(("y", 0), 0.1)
    exchange(a, b, now=0.2)
    assert b.booked == 0


def test_alone_there_is_nothing_to_tell_and_nothing_is_kept() -> None:
    alone = Replica("a", ["a"])
    for number in range(100):
        alone.place((f"{number}", 0), 0.0)
    assert not alone.shared.news and alone.shared.message(10.0) is None
    assert not alone.shared._booked and alone.shared.staleness(10.0) == 0.0


def test_strangers_and_rubbish_change_nothing() -> None:
    a, b, _ = three()
    a.shared.leave("b")
    b.place(("x", 0), 0.0)
    message = b.shared.message(0.0)
    assert message is not None
    a.shared.take_in(message, 0.0)
    assert a.booked == 0
    for rubbish in (b"", b"\xc1", msgspec.msgpack.encode([1, 2, 3]), message[:-1]):
        with pytest.raises(msgspec.MsgspecError):
            a.shared.take_in(rubbish, 0.0)


class AllAgree(RuleBasedStateMachine):
    """Placed and released anywhere, messages lost: when they have talked again, all know what is under way."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.replicas = three()
        self.placed = 0
        self.under_way: set[tuple[str, int]] = set()

    @rule(at=st.integers(0, 2))
    def place(self, at: int) -> None:
        key = (f"{self.placed}", 0)
        self.placed += 1
        self.replicas[at].place(key, self.now, lease=1e6)
        self.under_way.add(key)

    @rule(at=st.integers(0, 2), data=st.data())
    def release(self, at: int, data: st.DataObject) -> None:
        self.talk()  # a gateway tells whoever booked it, or one that has heard of it
        if self.under_way:
            key = data.draw(st.sampled_from(sorted(self.under_way)))
            self.replicas[at].release(key)
            self.under_way.discard(key)

    @rule(teller=st.integers(0, 2), hearers=st.sets(st.integers(0, 2)))
    def some_hear(self, teller: int, hearers: set[int]) -> None:
        message = self.replicas[teller].shared.message(self.now)
        for hearer in hearers if message is not None else ():
            self.replicas[hearer].shared.take_in(message, self.now)

    @rule()
    def talk(self) -> None:
        self.now += 1.0
        exchange(*self.replicas, now=self.now)
        self.now += 1.0
        exchange(*self.replicas, now=self.now)
        loads = [replica.load() for replica in self.replicas]
        assert loads[0] == loads[1] == loads[2]
        assert [replica.booked for replica in self.replicas] == [len(self.under_way)] * 3

    @invariant()
    def never_less_than_nothing(self) -> None:
        for replica in self.replicas:
            assert all(min(numbers) >= 0 for numbers in replica.load().values())


TestAllAgree = AllAgree.TestCase
TestAllAgree.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)
