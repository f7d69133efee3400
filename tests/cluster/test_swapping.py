"""Preempted requests whose KV comes back from the KV service, as their prompts take longer to compute."""

import asyncio
from pathlib import Path
from typing import Any

from cluster.harness import start_cluster, stop_cluster
from cluster.restore_run import answers
from cluster.test_tier_faults import compare
from cluster.tiny import tiny_model
from faults_hit import must_hit

SHAPE = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 6, "head_dim": 64}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2}


def question(number: int) -> dict[str, Any]:
    prompt = [(37 * number + 11 * i) % 40_000 + 10 for i in range(240)]
    return {"prompt": prompt, "max_tokens": 60, "temperature": 0, "ignore_eos": True, "logprobs": 0, "stream": True}


def test_what_preempted_requests_had_comes_back(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model", **SHAPE, **HEADS)
    workers = ("--dummy-seed", "5", "--threads", "1", "--kv-blocks", "64", "--local-prefill-tokens", "0")
    cluster = start_cluster(tmp_path, *workers, "--kv-memory-host", "64MiB", model=str(model))
    try:
        asked = [question(number) for number in range(4)]  # one has room behind two others
        alone = asyncio.run(answers(cluster, asked, 2))
        for turn in range(5):
            at_once = [body | {"cache_salt": str(turn)} for body in asked]
            compare(asyncio.run(answers(cluster, at_once, 4)), alone)
            if cluster.metric("tandem_preemptions_total", outcome="swapped"):
                break
        cluster.wait_idle()
        must_hit(cluster.metric("tandem_preemptions_total", outcome="swapped"), "all was computed again")
    finally:
        stop_cluster(cluster)
