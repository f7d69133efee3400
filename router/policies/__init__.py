"""The policies by the names of the setting `policy`."""

from router.policies.base import Draw, Overlap, Policy
from router.policies.chance import chance
from router.policies.history import history
from router.policies.least_outstanding import least_outstanding
from router.policies.overlap import overlap
from router.policies.prefix import prefix
from router.policies.round_robin import round_robin
from router.policies.session import session, session_key
from router.policies.two_choices import two_choices

POLICIES: dict[str, Policy] = {
    "prefix": prefix,
    "overlap": overlap,
    "history": history,
    "session": session,
    "two_choices": two_choices,
    "least_outstanding": least_outstanding,
    "round_robin": round_robin,
    "random": chance,
}

__all__ = ["POLICIES", "Draw", "Overlap", "Policy", "session_key"]
