"""The placement service: `router` with sockets around it. Never imports torch."""
