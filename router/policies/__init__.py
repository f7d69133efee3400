"""The policies by the names of the setting `policy`."""

from router.policies.base import Draw, Policy
from router.policies.chance import chance
from router.policies.least_outstanding import least_outstanding
from router.policies.prefix import prefix
from router.policies.round_robin import round_robin

POLICIES: dict[str, Policy] = {
    "prefix": prefix,
    "least_outstanding": least_outstanding,
    "round_robin": round_robin,
    "random": chance,
}

__all__ = ["POLICIES", "Draw", "Policy"]
