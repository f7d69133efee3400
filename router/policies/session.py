"""The same worker for a session, by rendezvous hashing.

Each worker draws a number for the session, from both their names, and the least wins. So every router agrees without
talking to the others, and when a worker leaves only its own sessions move.
"""

import hashlib

import numpy as np
from numpy.typing import NDArray

from router.policies.base import Draw
from router.snapshot import Ask, Snapshot


def session_key(name: bytes) -> int:
    """64 bits that stand for a session in `Ask.session`."""
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little")


def session(ask: Ask, workers: Snapshot, draw: Draw) -> NDArray[np.float64]:
    """The number that each worker draws, from 0 to 1."""
    names = np.ascontiguousarray(workers.table["worker"]).view(np.uint64).reshape(len(workers.table), -1)
    drawn = np.full(len(names), ask.session, np.uint64)
    for part in names.T:
        drawn = _mixed(drawn ^ part)
    return drawn / 2.0**64


def _mixed(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A permutation of 64-bit words in which each bit depends on all: the finish of splitmix64."""
    words = words + np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: NDArray[np.uint64] = words ^ (words >> np.uint64(31))
    return mixed
