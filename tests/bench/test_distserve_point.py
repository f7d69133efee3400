"""DistServe's published placement is the best of the two that come near it, and holds what it held here before."""

from bench.distserve_point import GPUS, as_published, offers, sharegpt, trials_of
from planner.sizing import Deployment, families, placements


def deployments(prefill: int) -> dict[int, Deployment]:
    """One instance a side, those that prefill on so many GPUs; by the GPUs of the one that decodes."""
    found = [one for one in placements(families(offers(whole_prompts=True)), GPUS) if as_published(one)]
    return {one.family.offer.gpus: one for one in found if one.family.prefill and one.family.prefill.gpus == prefill}


def test_two_that_prefill_and_one_that_decodes_serve_most_for_a_gpu() -> None:
    """Both hold until the prefill side is full, at 7.2 requests a second; a GPU more on the other side is of no use."""
    trials, of = trials_of(sharegpt(), ours=False), deployments(2)
    published, larger = of[1], of[2]
    assert (published.gpus, larger.gpus) == (3, 4)
    assert trials.holds(published, 6.2) and not trials.holds(published, 7.6)
    assert trials.holds(larger, 6.9) and not trials.holds(larger, 8.0)
    assert 6.2 / published.gpus > 8.0 / larger.gpus
