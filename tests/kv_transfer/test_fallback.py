"""A connector fails in mid-transfer: the transfer goes on over the next one, with the right tokens, between real parts.

The engines' tokens are a function of all KV bytes that they read back, so a page that is missing, stale or half
written is a wrong token.
"""

import asyncio
import os
import time
from collections.abc import Sequence

import pytest
from chaos.faults import Faults, Rates, dice, everywhere
from chaos.load import Load
from chaos.pair import PATIENT, Pair, linked
from optional import needs_nixl

from kv_transfer.connectors import selection
from kv_transfer.connectors.shared_memory import SharedMemorySender


def outcomes(pair: Pair) -> dict[str, int]:
    return {
        name: int(pair.decode.metrics.transfers.labels(name)._value.get())
        for name in ("committed", "recomputed", "aborted")
    }


def fallbacks(pair: Pair, failed: str, following: str) -> int:
    return int(pair.prefill.metrics.connector_fallbacks.labels(failed, following)._value.get())


def landed(pair: Pair, kind: str) -> int:
    return int(pair.decode.metrics.transfer_bytes.labels(kind)._value.get())


@pytest.mark.parametrize(
    ("kind", "following"),
    [("tcp", "zmq"), ("zmq", "tcp"), ("tcp", "gloo"), pytest.param("tcp", "nixl", marks=needs_nixl)],
)
@pytest.mark.parametrize("fault", ["cut", "corrupt", "half-open"])
async def test_transfers_go_on_when_streams_fail_in_the_middle(kind: str, following: str, fault: str) -> None:
    """No prompt is computed twice."""
    faults = Faults(dice(1), {"bytes": Rates.only(fault, 0.3)})
    async with linked(kind, faults, others=[following], lease_seconds=PATIENT) as pair:
        outcome = await Load(pair, abort_share=0).run(40)
        assert outcome.clean and outcome.ends == {"ended": 40}, outcome
        assert faults.total
        assert outcomes(pair) == {"committed": 40, "recomputed": 0, "aborted": 0}
        assert fallbacks(pair, kind, following) and landed(pair, following)


@pytest.mark.parametrize("following", ["tcp", "zmq"])
async def test_transfers_go_on_when_shared_memory_cannot_be_written(following: str) -> None:
    """The sender's file goes in the middle of a prompt; after a pause it is opened again and used."""
    async with linked("shared_memory", Faults(dice(2), {}), others=[following]) as pair:
        load = Load(pair, abort_share=0)
        assert (await load.run(4)).clean
        assert landed(pair, "shared_memory") and not landed(pair, following)
        peer = pair.prefill.sender._peers[0]
        memory = peer.selection.current.connector._inner  # type: ignore[attr-defined]
        assert isinstance(memory, SharedMemorySender)
        run = asyncio.create_task(load.run(24))
        while not any(sending.used and max(sending.pushed_tokens) for sending in pair.prefill.sender._sending.values()):
            await asyncio.sleep(0)
        ends = os.pipe()
        os.dup2(ends[0], memory._segment.descriptor)  # no file that could be locked
        assert (await run).clean
        for end in ends:
            os.close(end)
        assert fallbacks(pair, "shared_memory", following) and landed(pair, following)
        assert outcomes(pair) == {"committed": 24, "recomputed": 0, "aborted": 0}
        before, asked, patience_ends = landed(pair, "shared_memory"), 24, time.monotonic() + 20
        while landed(pair, "shared_memory") == before:
            assert time.monotonic() < patience_ends, "the better connector is not tried again"
            asked += 2
            assert (await load.run(asked)).clean
            await asyncio.sleep(0.2)
        assert outcomes(pair)["committed"] == asked


async def test_a_forced_connector_that_fails_says_so_and_no_other_is_used(capsys: pytest.CaptureFixture[str]) -> None:
    faults = Faults(dice(3), {"bytes": Rates.only("cut", 0.3)})
    async with linked("tcp", faults, others=["zmq"], forced="tcp") as pair:
        outcome = await Load(pair, abort_share=0).run(30)
        assert outcome.clean and faults.total, outcome
        assert outcomes(pair)["recomputed"] and not landed(pair, "zmq") and not fallbacks(pair, "tcp", "zmq")
    said = capsys.readouterr().out
    assert "KV connector failed, and there is no other" in said
    assert "zmq: not used, as tcp is forced (connector = auto allows others)" in said


@pytest.mark.parametrize(("kind", "others"), [("shared_memory", ["tcp", "zmq"]), ("tcp", ["zmq"]), ("zmq", ["gloo"])])
async def test_random_faults_with_others_to_fall_back_to(
    kind: str, others: Sequence[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everywhere, also in the words about switching; the better connector is soon back each time."""
    monkeypatch.setattr(selection, "FIRST_PAUSE_SECONDS", 0.05)
    monkeypatch.setattr(selection, "_LONGEST_PAUSE_SECONDS", 0.2)
    faults = Faults(dice(4), everywhere())
    async with linked(kind, faults, others=others) as pair:
        outcome = await Load(pair).run(200, until=lambda: faults.total > 50 and fallbacks(pair, kind, others[0]) > 2)
        assert outcome.clean, outcome
        assert faults.total > 50, faults.happened
        assert fallbacks(pair, kind, others[0]) > 2
