"""`make chaos`: faults by the thousand over every connector, and what became of the requests, as a page of results."""

import argparse
import asyncio
import logging
import os
import subprocess
import sys
import time
from collections import Counter, deque
from pathlib import Path
from typing import Any

import structlog
from chaos.faults import Faults, Rates, dice, everywhere
from chaos.load import Load, Outcome
from chaos.pair import CONNECTORS, Pair, short_waits, without_checksums

_FAILURE = Path("chaos-failure.log")  # what the workers logged in a round that was not clean
_ROUND = 500  # faults; then all is quiet and must be clean, and the next round has a new pair and seed


_logged: deque[str] = deque(maxlen=20_000)


def keep(logger: object, method: str, event: dict[str, Any]) -> dict[str, Any]:
    """What goes wrong is meant to: it is logged nowhere, but kept until the round turns out clean."""
    _logged.append(f"{time.monotonic():.3f} {event}")
    raise structlog.DropEvent


async def one_round(connector: str, faults: Faults, *, requests: int = 1 << 30, fenced: bool = True) -> Outcome:
    """Until there were enough faults, or for so many requests."""
    with short_waits():
        pair = Pair(connector, faults, fenced=fenced)
        await pair.start()
        try:
            return await Load(pair, fetch_share=0.3).run(requests, enough=_ROUND)
        finally:
            await pair.stop()


async def negative_controls() -> dict[str, int]:
    """Wrong tokens that are found when a protection is switched off."""
    with without_checksums():
        blind = await one_round("shared_memory", Faults(dice(1), {"push": Rates.only("corrupt", 0.1)}), requests=200)
    late = Faults(dice(2), {"push": Rates.only("replay", 0.3)})
    unfenced = await one_round("shared_memory", late, requests=200, fenced=False)
    return {"without checksums": blind.wrong_tokens, "without fencing": unfenced.wrong_tokens}


async def run(wanted: int, seed: int) -> tuple[Faults, Outcome, Counter[str], dict[str, int]]:
    """All rounds; stops at the first that is not clean."""
    controls = await negative_controls()
    all_faults, total, by_connector = Faults(dice(0), {}), Outcome(), Counter[str]()
    while all_faults.total < wanted and total.clean:
        for connector in CONNECTORS:
            seed += 1
            faults = Faults(dice(seed), everywhere())
            outcome = await one_round(connector, faults)
            by_connector[connector] += faults.total
            all_faults.happened += faults.happened
            total.ends += outcome.ends
            total.wrong_tokens += outcome.wrong_tokens
            left = [f"{count} left: {what}" for what, count in outcome.leftovers.items() if count]
            total.problems += [f"{connector}, seed {seed}: {problem}" for problem in outcome.problems + left]
            total.leftovers = {key: total.leftovers.get(key, 0) + n for key, n in outcome.leftovers.items()}
            print(
                f"{all_faults.total} faults, {total.ends.total()} requests: {connector}, seed {seed}, {outcome}",
                flush=True,
            )
            if not outcome.clean:
                _FAILURE.write_text("\n".join((*total.problems, *_logged)))
                break
            _logged.clear()
    return all_faults, total, by_connector, controls


def table(counts: Counter[tuple[str, ...]], heads: tuple[str, ...]) -> str:
    """Markdown."""
    rows = [f"| {' | '.join(key)} | {count} |" for key, count in sorted(counts.items())]
    return "\n".join([f"| {' | '.join(heads)} | faults |", f"|{'---|' * len(heads)}---:|", *rows])


def page(faults: Faults, total: Outcome, by_connector: Counter[str], controls: dict[str, int], seconds: float) -> str:
    """The result."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    connectors = ", ".join(f"{name} {count}" for name, count in by_connector.items())
    arguments = f' ARGS="{" ".join(sys.argv[1:])}"' if sys.argv[1:] else ""
    return f"""# KV transfers under faults

`make chaos{arguments}` at commit {commit}: {seconds:.0f} s on a busy machine with {os.cpu_count()} cores.

Expected before the run: every request ends with exactly the tokens of a request alone, and no block, transfer or turn
is left. A fault is counted when it has been carried out, with the states of both machines at that moment.

| | |
|---|---:|
| faults | {faults.total} ({connectors}) |
| requests that ended | {total.ends["ended"]} |
| requests that their client dropped | {total.ends["aborted"]} |
| wrong tokens | {total.wrong_tokens} |
| hangs, crashes, requests that ended otherwise | {len(total.problems)} |
| orphaned blocks | {total.leftovers.get("orphans", 0)} |
| anything else left when all was quiet | {sum(total.leftovers.values())} |
| negative control: wrong tokens found without checksums | {controls["without checksums"]} |
| negative control: wrong tokens found without fencing | {controls["without fencing"]} |

By kind and place. "order" is the control stream from decode to prefill, "answer" the way back, "bytes" the connector's
socket, "push" the writer itself; "verify" and "stop" are steps slowed down so that other faults meet them.

{table(faults.by(1, 0), ("kind", "place"))}

By state of the receiver and of the sender. "before": the order has not arrived; "?": what was hit names no transfer.

{table(faults.by(2, 3), ("receiver", "sender"))}
{failures(total.problems)}"""


def failures(problems: list[str]) -> str:
    """Why the run is not clean, if it is not."""
    if not problems:
        return ""
    return f"\n## It failed\n\nThe log of the round: `{_FAILURE}`.\n\n" + "".join(f"- {line}\n" for line in problems)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=100)
    parser.add_argument("--record", type=Path)
    options = parser.parse_args()
    structlog.configure(processors=[keep])
    logging.disable(logging.ERROR)
    started = time.monotonic()
    faults, total, by_connector, controls = asyncio.run(run(options.faults, options.seed))
    text = page(faults, total, by_connector, controls, time.monotonic() - started)
    print(text)
    if options.record is not None:
        options.record.write_text(text)
    sys.exit(0 if total.clean and all(controls.values()) else 1)


if __name__ == "__main__":
    main()
