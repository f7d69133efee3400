"""A whole cluster on a clock of its own: the router's own code, and workers that take time instead of computing."""
