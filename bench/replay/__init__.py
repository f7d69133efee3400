"""Traces replayed against the router's own code, with mock workers, on a clock of its own."""
