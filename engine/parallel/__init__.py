"""Tensor parallelism: one model over several processes, the ranks, that compute every step together.

Rank 0 is the worker's own process: it schedules, samples and publishes. It starts the others, which only follow.
"""
