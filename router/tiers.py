"""What a KV service tells, for each of its tiers: its row holds what is in that tier or in a nearer one.

So the leading blocks of a prompt that a row holds are those that come when nothing further away is looked at. A worker
has one row, of tier 0.
"""

from collections.abc import Iterator, Mapping, Sequence

from engine.request import TIERS, BlockRemoved, BlockStored, KvEvent

_NUMBERS = {"": 0} | {tier: 1 + at for at, tier in enumerate(TIERS)}


def number(tier: str) -> int:
    """Of a tier in the fleet's table; "": of workers. One that is not known is further away than all that are."""
    return _NUMBERS.get(tier, len(_NUMBERS))


def by_row(events: Sequence[KvEvent], rows: Mapping[int, int]) -> Iterator[tuple[int, list[KvEvent]]]:
    """What changes for each of the `rows`, by tier."""
    for tier, row in rows.items():
        yield row, [_seen(event, tier) for event in events]


def _seen(event: KvEvent, tier: int) -> KvEvent:
    if isinstance(event, BlockStored) and number(event.tier) > tier:
        return BlockRemoved(event.block_hashes)
    return event


def held_by_row(held: Mapping[str, Sequence[bytes]], rows: Mapping[int, int]) -> Iterator[tuple[int, list[bytes]]]:
    """The same of all blocks, by the nearest tier of each."""
    for tier, row in rows.items():
        yield row, [each for at, hashes in held.items() if number(at) <= tier for each in hashes]
