"""Ways to carry KV bytes: one file a connector, the interface in `base`, the choice between them in `selection`."""
