"""From the workers that there are to those that there should be: which to flip, remove and add, a few at a time.

Removals and flips come before additions, so that these find their GPUs free. Workers that never became ready go first,
then those that start, then the latest to come, whose caches are coldest. Some worker that can answer always stays.
"""

from collections.abc import Collection

from planner.decision import Action, Option
from planner.window import ROLES, Pools, Role, Worker


def reconcile(
    target: Option,
    pools: Pools,
    never_ready: list[Worker],
    sizes: Collection[int],
    *,
    flips: int,
    removals: int,
    additions: int,
) -> list[Action]:
    """Actions towards `target`: at most so many of each kind. Fixed workers and roles are left as they are.

    `sizes`: tensor-parallel degrees of workers that can be had. Only a worker of one of them is replaced for its size.
    """
    others = set(sizes) - {target.tensor_parallel}
    actions = [_remove(worker) for worker in never_ready if _movable(worker, pools)]
    gone = {action.worker for action in actions}
    there = {
        role: [
            each for each in pools.of(role, "starting", "ready") if each.name not in gone and each.gpus not in others
        ]
        for role in ROLES
    }
    odd = [each for each in pools.workers if each.gpus in others and each.state != "draining" and each.name not in gone]
    surplus = {role: len(there[role]) - target.count(role) for role in ROLES}
    serving = sum(worker.role != "prefill" and worker.state == "ready" for worker in pools.workers)
    spare = serving - (1 if target.gpus else 0)  # of those that can answer, how many may be taken
    for giver in ROLES:
        for taker in ROLES:
            while flips and surplus[giver] > 0 > surplus[taker] and not {giver, taker} & set(pools.fixed):
                ready = [worker for worker in there[giver] if worker.state == "ready" and not worker.fixed]
                stay = sum(worker.state == "ready" for worker in there[giver]) - 1
                if not ready or stay < target.count(giver) or (giver != "prefill" and not spare):
                    break
                worker = _latest(ready)
                there[giver].remove(worker)
                surplus[giver] -= 1
                surplus[taker] += 1
                spare -= giver != "prefill"
                flips -= 1
                actions.append(
                    Action(kind="flip", worker=worker.name, before=giver, role=taker, gpus=worker.gpus)
                )  # fmt: skip
    for role in ROLES:
        while removals and surplus[role] > 0:
            movable = [worker for worker in there[role] if _movable(worker, pools)]
            starting = [worker for worker in movable if worker.state == "starting"]
            if not movable or (not starting and role != "prefill" and not spare):
                break
            worker = _latest(starting or movable)
            there[role].remove(worker)
            spare -= role != "prefill" and worker.state == "ready"
            surplus[role] -= 1
            removals -= 1
            actions.append(_remove(worker))
    # Workers of another size go when those that replace them are ready.
    up = {role: sum(worker.state == "ready" for worker in there[role]) for role in ROLES}
    if all(up[role] >= target.count(role) for role in ROLES):
        actions += [_remove(worker) for worker in odd if _movable(worker, pools)][:removals]
    free = pools.gpus - pools.used_gpus
    for role in ROLES:
        gpus = there[role][0].gpus if there[role] else target.tensor_parallel  # a new one is like those of its role
        while additions and surplus[role] < 0 and free >= gpus and role not in pools.fixed:
            surplus[role] += 1
            additions -= 1
            free -= gpus
            actions.append(Action(kind="add", role=role, gpus=gpus))
    return actions


def _movable(worker: Worker, pools: Pools) -> bool:
    return not worker.fixed and worker.role not in pools.fixed


def _latest(workers: list[Worker]) -> Worker:
    return max(workers, key=lambda worker: (worker.since, worker.name))


def _remove(worker: Worker) -> Action:
    role: Role = worker.role
    return Action(kind="remove", worker=worker.name, role=role, gpus=worker.gpus)
