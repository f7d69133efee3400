"""What it costs others that a worker stores blocks."""

from engine.hashing import block_hashes
from engine.request import BlockRemoved, BlockStored
from router.placer import Placer
from router.snapshot import Ask

SIZE = 16
ASK = Ask(prompt_tokens=165, max_tokens=10)


def made(*workers: str, kv: bool = False) -> Placer:
    placer = Placer(policy="prefix", local_prefill_tokens=32, fetch_tokens=64, seed=1)
    number = placer.fleet.layout("l")
    for name in workers:
        placer.fleet.set(
            placer.fleet.join(name), ready=True, decodes=True, aggregated=True, fetches=True, sends=True,
            layout=number, block_size=SIZE, prefill_rate=1000.0, fetch_rate=100_000.0,
        )  # fmt: skip
    if kv:
        placer.fleet.set(placer.fleet.join("kv"), sends=True, layout=number, block_size=SIZE)
    return placer


def chain(number: int, blocks: int = 10) -> list[bytes]:
    return block_hashes(range(number, number + blocks * SIZE), SIZE, number.to_bytes(4, "little"))


def ask(placer: Placer, hashes: list[bytes], key: str = "x") -> int:
    """Places and ends at once; the row."""
    placed = placer.place((key, 0), ASK, [("l", hashes)], (), now=0.0, lease=10.0)
    placer.reservations.release(key, 0)
    return placed.decision.decode


def regret(placer: Placer, row: int = 0) -> float:
    placer.tick(100.0)
    return float(placer.fleet.table["regret"][row])


def cycle(placer: Placer, *, again: bool, row: int = 0) -> None:
    """A full cache: each of 40 chains drives another one out, that is asked for again or is not."""
    for number in range(40):
        placer.told(row, [BlockStored(chain(number))])
        if number:
            placer.told(row, [BlockRemoved(chain(number - 1))])
            if again:
                ask(placer, chain(number - 1))


def test_nothing_is_regretted_where_there_is_room() -> None:
    placer = made("a")
    for number in range(40):
        placer.told(0, [BlockStored(chain(number))])
        ask(placer, chain(number + 1))
    assert regret(placer) == 0


def test_what_goes_and_is_not_asked_for_is_not_missed() -> None:
    placer = made("a")
    cycle(placer, again=False)
    assert regret(placer) == 0


def test_what_goes_and_is_asked_for_again_is_missed_once() -> None:
    placer = made("a")
    cycle(placer, again=True)
    found = regret(placer)
    assert 0.9 < found <= 1
    for number in range(39):
        ask(placer, chain(number))  # again: all are there no more, and were missed before
    assert regret(placer) == found


def test_what_another_worker_or_a_tier_has_is_not_missed() -> None:
    for row in (1, 2):
        placer = made("a", "b", kv=True)
        for number in range(40):
            placer.told(row, [BlockStored(chain(number))])
        cycle(placer, again=True)
        assert regret(placer) == 0


def test_a_worker_with_room_is_not_charged_for_the_others() -> None:
    placer = made("a", "b")
    cycle(placer, again=True)
    placer.told(1, [BlockStored(chain(1000))])
    assert regret(placer) > 0.9
    assert regret(placer, 1) == 0
    placer.leave("a")
    placer.fleet.join("c")
    assert regret(placer) == 0


def test_a_copy_that_drives_out_what_is_missed_is_not_made_for_a_short_queue() -> None:
    """The other worker is idle, and would have the prefix in a moment: at the price of what goes there."""
    prefix = chain(7000)
    for again, chosen in ((False, 1), (True, 0)):
        placer = made("a", "b")
        cycle(placer, again=again, row=0)
        cycle(placer, again=again, row=1)
        placer.tick(100.0)
        placer.told(0, [BlockStored(prefix)])
        placer.fleet.set(0, queue=100.0, prefill_tokens=100.0, queue_at=1e9)  # 0.1 s; the prompt takes 0.165 s
        placed = placer.place(("y", 0), ASK, [("l", prefix)], (), now=100.0, lease=10.0)
        assert placed.decision.decode == chosen
        assert placed.source == (0 if chosen else None)
