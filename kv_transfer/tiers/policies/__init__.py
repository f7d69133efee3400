"""What is worth its place in a tier: one rule a file, behind `base.Policy`."""

from collections.abc import Callable

from kv_transfer.tiers.policies.arc import ARC
from kv_transfer.tiers.policies.base import Policy
from kv_transfer.tiers.policies.cost_aware import CostAware
from kv_transfer.tiers.policies.lfu import LFU
from kv_transfer.tiers.policies.lru import LRU
from kv_transfer.tiers.policies.quotas import Quotas
from kv_transfer.tiers.policies.second_hit import SecondHit

# By name, made for a number of blocks.
POLICIES: dict[str, Callable[[int], Policy]] = {
    "lru": LRU,
    "lfu": LFU,
    "arc": ARC,
    "cost": CostAware,
    "second_hit_lru": lambda capacity: SecondHit(LRU(capacity), capacity),
    "second_hit_arc": lambda capacity: SecondHit(ARC(capacity), capacity),
}


def policy_of(name: str, share: float = 1.0) -> Callable[[int], Policy]:
    """Makes the policy of that name. An owner's blocks may take `share` of the room while others want some."""
    if share >= 1:
        return POLICIES[name]
    if name == evicting(name):
        return lambda capacity: Quotas(POLICIES[name], capacity, share)
    return lambda capacity: SecondHit(Quotas(POLICIES[evicting(name)], capacity, share), capacity)


def evicting(name: str) -> str:
    """The policy that evicts as that one does, and lets all in."""
    return name.removeprefix("second_hit_")
