"""The engine: models, weights, attention, paged KV blocks, scheduler, sampler and the step loop. It knows no sockets.

`hashing`, `request`, `config` and `text` work without torch, since the gateway uses them.
"""
