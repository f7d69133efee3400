"""The prefill, decode or aggregated worker.

An engine on its own thread, and around it admission, tokens, KV events and the two sides of KV transfers.
"""
