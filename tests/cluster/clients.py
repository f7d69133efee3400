"""Clients that ask again and again, and to whom no request may fail."""

import threading
import time

import httpx
from cluster.harness import Cluster

_PAUSE = 0.03  # seconds: what is waited for meanwhile needs the processor, too


def ask(cluster: Cluster, first: int, tokens: int = 4) -> httpx.Response:
    body = {"model": cluster.model, "prompt": [first, *range(500, 630)], "max_tokens": tokens, "ignore_eos": True}
    return httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=120)


class Clients:
    """Requests one after the other in several threads, until the end of the block; none may fail."""

    def __init__(self, cluster: Cluster, threads: int = 3) -> None:
        self.statuses: list[int] = []
        self._cluster = cluster
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(threads)]

    def _run(self, number: int) -> None:
        while not self._over.is_set():
            self.statuses.append(ask(self._cluster, number).status_code)
            time.sleep(_PAUSE)

    def wait(self, more: int) -> None:
        """Until so many more have been answered."""
        target, deadline = len(self.statuses) + more, time.monotonic() + 120
        while len(self.statuses) < target:
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def __enter__(self) -> "Clients":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()
