"""The KV service: keeps prefixes beyond workers' caches, for any worker that asks for them."""
