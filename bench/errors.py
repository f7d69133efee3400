"""Errors that a user can mend."""


class BenchError(Exception):
    """Bad options, unreadable data or a server that cannot be measured; the message says what to do."""
