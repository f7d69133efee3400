"""Attention over the paged KV cache: the interface and one backend a file."""
