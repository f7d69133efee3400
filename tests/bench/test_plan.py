"""`tandem plan`: the smallest cluster that holds."""

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from bench.config import LoadConfig
from bench.measure.slo import parse_slo
from bench.replay.trials import Trials
from planner.offer import Offer
from planner.simulator.demand import Demand, Trace
from planner.simulator.job import BLOCK_SIZE
from planner.simulator.settings import Settings
from planner.simulator.timing import Timing
from planner.sizing import (
    Deployment,
    Family,
    Objectives,
    Work,
    alone,
    cheapest,
    families,
    least,
    most_goodput,
    placements,
    splits,
    work_of,
)

ONE = Offer()
APART, TOGETHER = Family(ONE, ONE), Family(ONE)


def plan(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "services.cli", "plan", "--quiet", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def load(rate: float, prompt: int, output: int, count: int = 100) -> Trace:
    blocks = (prompt + output) // BLOCK_SIZE
    demands = [
        Demand(prompt, output, [(number << 32 | block).to_bytes(16, "little") for block in range(blocks)])
        for number in range(1, count + 1)
    ]
    return Trace("made", demands, np.arange(count) / rate)


def every_split(family: Family, workers: int) -> list[Deployment]:
    if family.prefill is None:
        return [family.of(0, workers)]
    return [family.of(prefill, workers - prefill) for prefill in range(1, workers)]


def trials_of(trace: Trace, objectives: Objectives) -> Trials:
    told = [f"{name}={value}s" for name in ("ttft", "tpot") if math.isfinite(value := getattr(objectives, name))]
    config = LoadConfig(url="", rate=trace.own_rate, num_requests=len(trace.demands))
    return Trials(trace, config, Settings(), parse_slo(",".join(told)), objectives.share, None)


@pytest.mark.parametrize("needed", [1, 3, 4, 7, 16, 39, 40])
@pytest.mark.parametrize("work", [Work(0.1, 0.2), Work(1.2, 1.4), Work(0.4, 3.0)])
@pytest.mark.parametrize("family", [APART, TOGETHER])
def test_the_smallest_number_is_found(family: Family, work: Work, needed: int) -> None:
    tried: list[Deployment] = []

    def holds(deployment: Deployment) -> bool:
        tried.append(deployment)
        return deployment.workers >= needed

    found = cheapest([(family, work, least(family, work))], 40, None, holds)
    assert found is not None and found.workers == max(needed, least(family, work).workers)
    assert len(tried) == len(set(tried)), "nothing is simulated twice"
    assert [each for each in tried if each.workers == found.workers] == splits(family, work, found.workers)


def test_where_none_holds() -> None:
    light = (APART, Work(1.0, 1.0), APART.of(1, 1))
    assert cheapest([light], 8, None, lambda deployment: False) is None
    assert cheapest([(APART, Work(6.0, 3.0), APART.of(6, 3))], 8, None, lambda deployment: True) is None
    assert cheapest([light], 8, 1, lambda deployment: True) is None, "the GPUs are too few"


def test_the_cheapest_kind_is_found_and_no_dearer_one_is_tried_after_it() -> None:
    """A large card, and a small one at a third of the price of which twice as many are needed."""
    large, small = Offer(gpu="large", price=3.0), Offer(gpu="small", price=1.0)
    tried: list[Deployment] = []

    def holds(deployment: Deployment) -> bool:
        tried.append(deployment)
        first, others = deployment.family.prefill or deployment.family.offer, deployment.family.offer
        power = deployment.prefill * (2 if first is large else 1) + deployment.others * (2 if others is large else 1)
        return power >= 6

    works = [
        (family, work, least(family, work))
        for family in families([large, small])
        for work in [Work(*(1.0 if one is large else 2.0 for one in (family.prefill or family.offer, family.offer)))]
    ]
    found = cheapest(works, 16, None, holds)
    assert found is not None and found.cost == 6.0 and found.workers == 6
    assert all(one.cost < 6.0 for one in tried[tried.index(found) + 1 :] if one.family != found.family)
    assert cheapest(works, 16, 3, holds) == Family(large).of(0, 3), "of few GPUs the large ones"


def test_who_is_late_even_alone_is_no_choice() -> None:
    trace = load(1, 3000, 50)
    slow = Offer(timing=Timing(prompt_token=1e-3))
    soon = Objectives(ttft=1.0)
    assert alone(trace, Family(ONE, slow), soon) == 0.0 and alone(trace, Family(slow, ONE), soon) == 1.0
    assert alone(trace, TOGETHER, Objectives(tpot=1e-3)) == 0.0
    assert alone(trace, TOGETHER, Objectives(tpot=0.01)) == 1.0


def test_placements_are_all_of_so_many_gpus() -> None:
    two = Offer(gpus=2)
    found = [
        (one.family.prefill, one.prefill, one.family.offer, one.others) for one in placements(families([ONE, two]), 3)
    ]
    assert found == [
        (None, 0, ONE, 1), (None, 0, ONE, 2), (None, 0, ONE, 3), (None, 0, two, 1),
        (ONE, 1, ONE, 1), (ONE, 1, ONE, 2), (ONE, 2, ONE, 1), (ONE, 1, two, 1), (two, 1, ONE, 1),
    ]  # fmt: skip


def test_the_most_requests_for_the_cost() -> None:
    """Each prefill worker does 3 requests/s, each other one 5; the bound says twice as many."""
    asked: list[tuple[Deployment, float]] = []

    def rate(one: Deployment) -> float:
        return float(min(3 * one.prefill, 5 * one.others))

    def holds(one: Deployment, wanted: float) -> bool:
        asked.append((one, wanted))
        return wanted <= rate(one)

    found = most_goodput(placements([APART], 8), lambda one: 2 * rate(one), holds, precision=0.01)
    assert (found[0].deployment.prefill, found[0].deployment.others) == (5, 3)
    assert found[0].rate == pytest.approx(15, rel=0.011) and found[0].for_cost == pytest.approx(15 / 8, rel=0.011)
    left_out = APART.of(1, 7)
    assert left_out not in [one for one, _ in asked], "6 of 8 at most is worse than what was found"


def test_work_grows_with_the_load_and_goes_to_the_side_that_has_it() -> None:
    settings = Settings()
    prompts = work_of(load(10, 8000, 10), TOGETHER, Objectives(tpot=0.02))
    answers = work_of(load(10, 100, 1000), TOGETHER, Objectives(tpot=0.02))
    assert prompts.prefill > 10 * prompts.decode and answers.decode > 10 * answers.prefill
    # 10 prompts a second: each takes what the timing says.
    assert prompts.prefill == pytest.approx(10 * 100 / 99 * settings.timing.prompt(0, 8000, 1280))
    tight = work_of(load(10, 100, 1000), TOGETHER, Objectives(tpot=0.006))
    assert tight.decode > answers.decode, "shorter steps hold fewer answers"
    assert splits(TOGETHER, answers, 4) == [TOGETHER.of(0, 4)]
    assert all(0 < each.prefill < 4 for work in (answers, prompts) for each in splits(APART, work, 4))


@pytest.mark.parametrize("objectives", [Objectives(3.0, 0.05, share=0.9), Objectives(ttft=1.0), Objectives(tpot=0.02)])
@pytest.mark.parametrize(
    "trace",
    [
        load(1000, 2000, 50, count=150),  # a burst that is over long before its objectives are
        load(200, 40, 60, count=300),  # short prompts, of which a step has many
        load(6, 8000, 3, count=60),
        load(3000, 300, 1, count=400),
    ],
    ids=["burst", "short", "long", "one token"],
)
def test_fewer_than_the_fewest_do_not_hold(trace: Trace, objectives: Objectives) -> None:
    trials = trials_of(trace, objectives)
    for family in (TOGETHER, APART):
        bound = trials.fewest(family)
        few = [one for count in range(1, bound.workers) for one in every_split(family, count)]
        assert not any(trials.holds(one) for one in few[-3:]), f"{bound} is no bound"
        assert bound.workers <= least(family, trials.work(family)).workers + 1


def test_a_burst_has_the_time_that_its_objectives_leave(tmp_path: Path) -> None:
    """200 prompts of 44 ms within 5 s need two workers, though they come within 0.2 s."""
    flags = ("--rate", "1000", "--input-len", "2000", "--output-len", "50", "--num-requests", "200")
    done = plan(*flags, "--slo", "ttft=5s,tpot=50ms", "--json", str(tmp_path / "plan.json"))
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "plan.json").read_text())["choice"]["workers"] == 2


def test_more_workers_may_cost_less_where_one_side_is_dear() -> None:
    dear, cheap = Offer(gpu="dear", price=10.0), Offer(gpu="cheap", price=1.0)
    family, work = Family(cheap, dear), Work(0.4, 0.6)

    def holds(one: Deployment) -> bool:
        return one.prefill >= 2 or one.others >= 3

    assert family.of(2, 1) in splits(family, work, 3) and family.of(1, 3) in splits(family, work, 4)
    assert cheapest([(family, work, family.of(1, 1))], 16, None, holds) == family.of(1, 3)


def test_the_cheapest_tried_that_holds_is_chosen() -> None:
    """Though more workers did worse, so that the search did not come upon it."""
    trials = trials_of(load(1, 1000, 10), Objectives(1.0, 0.05, share=0.9))
    trial = trials.run(TOGETHER.of(0, 3))
    for workers, attainment in ((1, 0.5), (2, 0.92), (3, 0.8), (4, 0.95)):
        deployment = TOGETHER.of(0, workers)
        told = replace(trial, cost=deployment.cost, attainment=attainment)
        trials.tried[deployment, trial.rate] = told
        trials.tried[TOGETHER.of(0, 1), 2 * trial.rate] = replace(told, attainment=1.0)
    assert trials.best(8, None) == TOGETHER.of(0, 2)
    assert trials.best(1, None) is None and trials.best(8, 1) is None


def test_a_rate_far_below_the_capacity_is_found() -> None:
    (found,) = most_goodput([TOGETHER.of(0, 1)], lambda _: 100.0, lambda _, rate: rate <= 0.7, precision=0.02)
    assert found.rate == pytest.approx(0.7, rel=0.02)


def test_a_plan_holds_and_one_worker_less_does_not(tmp_path: Path) -> None:
    flags = ("--rate", "12", "--input-len", "4000", "--output-len", "100", "--num-requests", "300")
    done = plan(*flags, "--slo", "ttft=500ms,tpot=20ms", "--json", str(tmp_path / "plan.json"))
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "plan.json").read_text())
    choice = found["choice"]
    assert choice["attainment"] >= 0.9
    assert max((row["attainment"] for row in found["tried"] if row["workers"] < choice["workers"]), default=0) < 0.9
    sides = ["--prefill", str(choice["prefill"]), "--decode", str(choice["workers"] - choice["prefill"])]
    wanted = sides if choice["prefill"] else ["--aggregated", str(choice["workers"])]
    assert " ".join(["tandem up", *wanted]) in done.stdout


def test_questions_that_wait_for_answers_are_no_work_at_once() -> None:
    first = Demand(1000, 100, [bytes([1] * 16)])
    turns = [first, Demand(2000, 100, [bytes([1] * 16)], follows=0, think=60.0), Demand(1000, 100, [bytes([2] * 16)])]
    spread = work_of(Trace("made", turns, np.array([0.0, 0.0, 1.0])), TOGETHER, Objectives())
    at_once = [Demand(each.prompt_tokens, each.output_tokens, each.hashes) for each in turns]
    dense = work_of(Trace("made", at_once, np.array([0.0, 0.0, 1.0])), TOGETHER, Objectives())
    assert spread.prefill < dense.prefill / 50 and spread.decode < dense.decode / 50


def test_what_cannot_be_is_said() -> None:
    assert "is a ladder" in plan("--rate", "1,2", "--slo", "ttft=1s").stderr
    flags = ("--rate", "50", "--input-len", "8000", "--num-requests", "50")
    done = plan(*flags, "--slo", "ttft=1s", "--max-workers", "2")
    assert done.returncode == 1
    assert "no cluster of up to 2 workers" in done.stderr and "raise --max-workers" in done.stderr
    assert "needs an SLO" in plan(*flags).stderr


def test_a_card_that_was_never_measured(tmp_path: Path) -> None:
    shape = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 128_256,
        "hidden_size": 8192,
        "intermediate_size": 28_672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 8192,
    }
    (tmp_path / "config.json").write_text(json.dumps(shape))
    flags = ("--rate", "1", "--input-len", "1000", "--output-len", "20", "--num-requests", "20")
    flags += ("--slo", "ttft=2s,tpot=80ms")
    done = plan(*flags, "--gpu", "H100", "--model", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "--tensor-parallel 2" in done.stdout and "GPUs in all" in done.stdout
    assert "belong together" in plan(*flags, "--gpu", "H100").stderr
    assert "is not known, but A100" in plan(*flags, "--gpu", "TPU", "--model", str(tmp_path)).stderr


def test_a_kind_without_room_for_a_prompt_is_left_out(tmp_path: Path) -> None:
    small, large = tmp_path / "small.json", tmp_path / "large.json"
    small.write_text('{"timing": {"sequence": 1.0}, "gpus": 1, "kv_tokens": 600}')
    large.write_text('{"timing": {"prompt_token": 1e-5}, "gpus": 2, "kv_tokens": 800000}')
    load = ("--rate", "1", "--num-requests", "10", "--input-len", "1000", "--output-len", "10", "--quiet")
    command = [sys.executable, "-m", "services.cli", "plan", *load, "--slo", "ttft=1s,tpot=50ms", "--timing"]
    done = subprocess.run([*command, str(small), "--timing", str(large)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "TP1" not in done.stdout, done.stderr
    done = subprocess.run([*command, str(small)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and "too long for workers that hold 600 tokens" in done.stderr


def test_who_only_prefills_needs_room_for_the_prompt_alone() -> None:
    trace, objectives = load(1, 1000, 1000), Objectives(1.0, 0.05)
    small, large = Offer(kv_tokens=1600), Offer(kv_tokens=2600)
    trials = trials_of(trace, objectives)
    assert trials.can(Family(large, small)) and not trials.can(Family(small, large)) and not trials.can(Family(small))
    assert trials.holds(Family(large, small).of(1, 9)), "and so it is served"


def test_a_cache_without_any_token_is_refused() -> None:
    done = plan("--rate", "1", "--slo", "ttft=1s,tpot=50ms", "--kv-tokens", "0")
    assert done.returncode == 2 and "--kv-tokens" in done.stderr and "Traceback" not in done.stderr
