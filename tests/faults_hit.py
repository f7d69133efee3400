"""Faults that must hit something that is under way, on machines that may be too busy, or too quick, for that."""


class FaultMissed(Exception):
    """Nothing was disturbed, so the test says nothing. It is run again, as little else is (Makefile)."""


def must_hit(hit: object, otherwise: str) -> None:
    """Raises FaultMissed."""
    if not hit:
        raise FaultMissed(otherwise)
