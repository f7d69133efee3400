"""The books of pinned prefixes, against a dictionary that counts everything anew each time."""

import random

from kv_transfer.tiers.pins import Pins


def hashes(*numbers: int) -> list[bytes]:
    return [number.to_bytes(16, "big") for number in numbers]


def test_bounds_are_told_and_blocks_of_several_pins_count_once() -> None:
    pins = Pins(most=8, most_of_owner=5, longest=100.0)
    assert pins.pin("a", "x", hashes(1, 2, 3), 10, now=0) == (granted := pins.pin("a", "x", hashes(1, 2, 3), 10, now=0))
    assert (granted.blocks, granted.seconds, granted.limit) == (3, 10, "")
    granted = pins.pin("b", "x", hashes(1, 2, 4, 5, 6), 1000, now=0)  # 1 and 2 are pinned already
    assert (granted.blocks, granted.seconds, granted.limit) == (4, 100, "tenant")
    granted = pins.pin("c", "y", hashes(1, 11, 12, 13, 14), 10, now=0)  # 1 counts for both of them
    assert (granted.blocks, granted.limit) == (4, "all") and pins.blocks == 8
    assert pins.pin("d", "z", hashes(20), 10, now=0).limit == "all" and len(pins) == 3
    assert pins.keep("c", "lasting") and not pins.keep("c", "lasting")
    assert pins.pin("lasting", "y", hashes(9), 1, now=0).blocks == 4  # it stays
    assert sorted(pins.drain()[0]) == hashes(1, 2, 3, 4, 5, 11, 12, 13)
    assert pins.expire(now=50) == 1 and pins.drain() == ([], hashes(3))
    assert pins.expire(now=100) == 1 and sorted(pins.drain()[1]) == hashes(2, 4, 5)
    assert pins.release("lasting") and not pins.release("lasting")
    assert not len(pins) and not pins.blocks


def test_a_tenant_has_not_more_than_so_many_pins() -> None:
    pins = Pins(most=10, most_of_owner=10, longest=1.0)
    granted = [pins.pin(str(number), "x", hashes(1), 1, now=0) for number in range(1025)]
    assert [each.limit for each in granted] == [""] * 1024 + ["tenant"]
    assert pins.pin("y", "y", hashes(1), 1, now=0).blocks == 1
    assert pins.pin("7", "x", hashes(2), 1, now=0).blocks == 1  # renewed


def test_what_is_told_is_what_pins_hold() -> None:
    dice, pins, expected = random.Random(3), Pins(40, 25, 8.0), dict[str, tuple[list[bytes], float]]()
    told: set[bytes] = set()
    for step in range(3000):
        name, now = str(dice.randrange(12)), step / 10
        match dice.randrange(4):
            case 0 | 1:
                wish = hashes(*dice.sample(range(60), dice.randint(1, 12)))
                granted = pins.pin(name, str(int(name) % 3), wish, dice.uniform(0, 10), now)
                expected.pop(name, None)
                if granted.blocks:
                    expected[name] = wish[: granted.blocks], now + granted.seconds
            case 2:
                assert pins.release(name) == (expected.pop(name, None) is not None)
            case _:
                pins.expire(now)
                expected = {each: pin for each, pin in expected.items() if pin[1] > now}
        pinned, ended = pins.drain()
        assert not told & set(pinned) and told >= set(ended)
        told = told.union(pinned).difference(ended)
        assert told == set().union(*(blocks for blocks, _ in expected.values())) and pins.blocks == len(told) <= 40
        for owner in range(3):
            own = set().union(*(blocks for each, (blocks, _) in expected.items() if int(each) % 3 == owner))
            assert len(own) <= 25
