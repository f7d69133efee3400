"""A generated trace of agents that call tools: long common prompts, contexts that grow over many short turns.

It stands in for recorded ones and is no recording. Each agent belongs to one of 12 applications, some far more used
than others, each with its own system prompt and tool descriptions of 3,000 to 12,000 tokens. After a task of 800 tokens
or so come turns: a short answer (a call), the tool's time, the tool's output, then a request with all that was said
before. Times follow the agent's own clock, as in a recording: an answer is taken to last 12 ms a token. As many agents
are at work at first as later.
"""

import random

from bench.workloads.mooncake import TraceRequest
from planner.simulator.job import BLOCK_SIZE

_APPLICATIONS = 12
_REQUESTS = 20_000
_AGENTS_PER_SECOND = 4.0
_BEFORE = 300.0  # seconds in which agents began that are at work at first
_MEAN_TURNS = 14
_MOST_CONTEXT = 60_000  # tokens; an agent ends before
_ANSWER_SECONDS = 0.012  # a token


def tool_agent(seed: int) -> list[TraceRequest]:
    """Requests in the order of their times; the ids of a request's blocks go on over its answer."""
    rng = random.Random(seed)
    systems = [rng.randint(3_000, 12_000) for _ in range(_APPLICATIONS)]
    popularity = [1 / (1 + rank) for rank in range(_APPLICATIONS)]
    requests: list[TraceRequest] = []
    started, agents = -_BEFORE, 0
    while len(requests) < _REQUESTS:
        started += rng.expovariate(_AGENTS_PER_SECOND)
        agents += 1
        application = rng.choices(range(_APPLICATIONS), popularity)[0]
        made = _agent(rng, agents, application, systems[application])
        requests += [
            TraceRequest(1e3 * (started + after), context, answer, ids)
            for after, context, answer, ids in made
            if started + after >= 0
        ]
    return sorted((one for one in requests if one.timestamp <= 1e3 * started), key=lambda one: one.timestamp)


def _agent(
    rng: random.Random, agent: int, application: int, system: int
) -> list[tuple[float, int, int, tuple[int, ...]]]:
    """(seconds after its start, tokens of the prompt, of the answer, hash ids) of each turn."""
    turns = 1 + round(rng.expovariate(1 / (_MEAN_TURNS - 1)))
    context = system + BLOCK_SIZE + round(rng.lognormvariate(5.5, 0.8))
    shared = system // BLOCK_SIZE
    after, made = 0.0, list[tuple[float, int, int, tuple[int, ...]]]()
    while len(made) < turns and context < _MOST_CONTEXT:
        answer = 20 + round(rng.lognormvariate(4.4, 0.8))
        ids = [(application + 1) << 40 | block for block in range(shared)]
        ids += [1 << 50 | agent << 20 | block for block in range(shared, (context + answer) // BLOCK_SIZE + 1)]
        made.append((after, context, answer, tuple(ids)))
        context += answer + round(min(12_000.0, rng.lognormvariate(6.0, 1.2)))
        after += _ANSWER_SECONDS * answer + 0.1 + rng.expovariate(1 / 3.0)
    return made
