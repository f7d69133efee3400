"""Services: one process per role, the cluster state they share, and the `tandem` command. Thin wiring of the rooms below."""
