"""Whether the beginning of a prompt is better fetched from a worker that has it cached than computed once more.

A pure function, as `router.policy`. What it says is a hint: who is told waits no longer than it would compute, and
computes what does not come.
"""

from collections.abc import Iterable

from router.policy import Ask, Candidate


def source_for(
    computing: Candidate, ask: Ask, candidates: Iterable[Candidate], *, fetch_tokens: int
) -> Candidate | None:
    """The worker from which `computing` is to fetch; None: none has `fetch_tokens` more of the prompt, or it is slower.

    Only blocks of equal layout are exchanged: others would be rounded, or packed anew. Where nothing was measured a
    fetch is tried, as it can only be measured then. 0 `fetch_tokens`: never.
    """
    if not fetch_tokens or ask.local_prefill_only or computing.fetch_rate == 0:
        return None
    others = [c for c in candidates if c.layout == computing.layout and c.worker != computing.worker]
    best = max(others, key=lambda c: (c.cached_blocks, -c.outstanding.prefill_tokens, c.worker), default=None)
    if best is None or ask.uncached(computing.cached_tokens) - ask.uncached(best.cached_tokens) < fetch_tokens:
        return None
    # Both would move or compute the same tokens, so the rates decide.
    is_slower = computing.fetch_rate and computing.prefill_rate and computing.fetch_rate <= computing.prefill_rate
    return None if is_slower else best
