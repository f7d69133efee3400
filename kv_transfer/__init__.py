"""Moving KV blocks between workers: references that go stale safely, the two state machines of a transfer, connectors.

What belongs here: who may write which block and until when, and the ways to carry the bytes. What does not: gRPC, the
engine's scheduling and processes, which `services` wires to this room.
"""
