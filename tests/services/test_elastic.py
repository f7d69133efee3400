"""Workers of several models that come and go as wished: each model has its own bound."""

from typing import Any

import pytest

from planner.window import Role
from services.elastic import ChildWorkers, Wishes
from services.parts import Part
from services.planner.wanted import Wish
from services.supervisor import Child, Supervisor


class Machine:
    """Workers of two models, `a` with two of them."""

    def __init__(self) -> None:
        self.kinds = [("decode", "a"), ("decode", "a"), ("decode", "b")]
        self.models = {"decode-0": "a", "decode-1": "a", "decode-2": "b"}

    async def run(self, name: str, role: str, like: int) -> None:
        self.models[name] = self.kinds[like][1]

    def end(self, name: str) -> None:
        del self.models[name]


def wish(what: Any, model: str, role: Role = "decode") -> Wish:
    return Wish(what, model, role, 0.0)


async def fulfil(machine: Machine, most: int, **wishes: Wish) -> None:
    wanted: Any = None
    told = {name.replace("_", "-"): each for name, each in wishes.items()}
    await Wishes(wanted, machine, most)._fulfil(told)


@pytest.mark.parametrize(("most", "of_b"), [(0, 1), (2, 2), (3, 3)])
async def test_workers_of_another_model_take_no_place(most: int, of_b: int) -> None:
    machine = Machine()
    more = {f"decode_{number}": wish("run", "b") for number in range(3, 6)}
    await fulfil(machine, most, **more)
    assert list(machine.models.values()).count("b") == of_b


async def test_a_place_that_is_free_is_no_other_models() -> None:
    machine = Machine()
    await fulfil(machine, 0, decode_0=wish("end", "a"), decode_3=wish("run", "b"), decode_4=wish("run", "a"))
    assert sorted(machine.models.items()) == [("decode-1", "a"), ("decode-2", "b"), ("decode-4", "a")]
    for most in (0, 5):
        await fulfil(machine, most, decode_9=wish("run", "c"), gateway=wish("end", "a"))
    assert "decode-9" not in machine.models


async def test_children_are_known_by_their_model() -> None:
    class Known(Supervisor):
        async def add(self, child: Child) -> None:
            self.children.append(child)

    def child(name: str, part: Part) -> Child:
        return Child(name, [], {})

    parts = [Part("router"), Part("decode", {"model_name": "a"}, 0), Part("decode", {"model_name": "b"}, 1)]
    children = [Child(name, [], {}) for name in ("router", "decode-0", "decode-1")]
    workers = ChildWorkers(Known(children, lambda *_, **__: None, lambda *_: None), parts, child)
    await workers.run("decode-2", "prefill", 1)
    assert workers.models == {"decode-0": "a", "decode-1": "b", "decode-2": "b"}
    children.remove(children[0]), children.pop(0)
    assert workers.models == {"decode-1": "b", "decode-2": "b"}
