"""Every task by name, and names for groups of them."""

from __future__ import annotations

from collections.abc import Sequence

from sparda_jax.evaluation.tasks import helmet, longbench, reasoning, ruler, ruler_qa
from sparda_jax.evaluation.tasks.base import Task

TASKS: dict[str, Task] = {
    **ruler.TASKS,
    **ruler_qa.TASKS,
    **longbench.TASKS,
    **longbench.TASKS_E,
    **helmet.TASKS,
    **reasoning.TASKS,
}
GROUPS: dict[str, tuple[str, ...]] = {
    "ruler": tuple(ruler.TASKS),
    "ruler13": (*ruler.TASKS, *ruler_qa.TASKS),
    "longbench": tuple(longbench.TASKS),
    "longbench14": longbench.SPARDA,
    "longbench_e": tuple(longbench.TASKS_E),
    "helmet": tuple(helmet.TASKS),
    "math": tuple(reasoning.TASKS),
}


def find(names: Sequence[str]) -> list[Task]:
    """The tasks of these names and groups, each once, in this order.

    Raises:
        ValueError: an unknown name.
    """
    found: dict[str, Task] = {}
    for name in names:
        if name not in TASKS and name not in GROUPS:
            known = ", ".join((*GROUPS, *TASKS))
            raise ValueError(f"unknown task {name!r}, expected one of {known}")
        for member in GROUPS.get(name, (name,)):
            found[member] = TASKS[member]
    return list(found.values())
