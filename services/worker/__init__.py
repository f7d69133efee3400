"""The prefill, decode or aggregated worker: an engine on its own thread, and around it admission, tokens, KV events and transfers."""
