"""Services: one process per role, the cluster state they share, and the `tandem` command.

Thin wiring of the rooms below: what decides something belongs there, what talks to the network belongs here.
"""
