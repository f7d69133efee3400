"""Loads and traces for the simulator in `planner`, and what it did with them."""
