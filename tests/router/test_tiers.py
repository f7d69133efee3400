"""What a KV service tells of its tiers, against what can be had of it."""

import random

from engine.request import TIERS, BlockRemoved, BlockStored, CacheCleared, KvEvent
from kv_transfer.tiers.announced import Announced
from router.index import BlockIndex
from router.tiers import by_row, held_by_row, number

CHAIN = [bytes([at]) * 16 for at in range(12)]


def leading(tiers: dict[str, set[bytes]], furthest: str) -> int:
    near = set().union(*(tiers[tier] for tier in TIERS[: TIERS.index(furthest) + 1] if tier in tiers))
    return next((at for at, each in enumerate(CHAIN) if each not in near), len(CHAIN))


def test_a_row_has_what_is_no_further_away() -> None:
    dice, names = random.Random(3), ("host", "disk", "object")
    announced, index = Announced(names), BlockIndex()
    tiers: dict[str, set[bytes]] = {name: set() for name in names}
    rows = {number(name): 5 + at for at, name in enumerate(names)}
    for turn in range(3000):
        name, some = dice.choice(names), dice.sample(CHAIN, dice.randint(1, 8))
        event: KvEvent
        if dice.random() < 0.01:
            event, tiers[name] = CacheCleared(), set()
        elif dice.random() < 0.6:
            event, tiers[name] = BlockStored(some), tiers[name] | set(some)
        else:
            event, tiers[name] = BlockRemoved(some), tiers[name] - set(some)
        for row, events in by_row(announced.changed(name, [event]), rows):
            index.apply(row, events)
        if turn % 100 == 50:  # a router that begins anew
            index = BlockIndex()
            for row, hashes in held_by_row(announced.nearest(), rows):
                index.replace(row, hashes)
        depths = index.depths(CHAIN, 8)
        assert [depths[row] for row in rows.values()] == [leading(tiers, name) for name in names]


def test_a_worker_has_one_row() -> None:
    events: list[KvEvent] = [BlockStored(CHAIN, 0, b"p", b"r"), BlockRemoved(CHAIN[:2]), CacheCleared()]
    assert list(by_row(events, {0: 3})) == [(3, events)]
    assert list(held_by_row({"": CHAIN}, {0: 3})) == [(3, CHAIN)]


def test_a_tier_that_is_not_known_is_of_no_use() -> None:
    (told,) = by_row([BlockStored(CHAIN, tier="tape")], {1: 3})
    assert told == (3, [BlockRemoved(CHAIN)])
    assert list(held_by_row({"tape": CHAIN, "host": []}, {1: 3, 4: 4})) == [(3, []), (4, [])]
