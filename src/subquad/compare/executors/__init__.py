"""Where the pieces of a comparison run: in this process, as tasks of Ray, or as jobs of Slurm.

An engine is one file here with a subclass of `Executor` (of `Cluster` if it runs pieces elsewhere), and an entry in
EXECUTORS. Its package is imported when it is used.
"""

from collections.abc import Mapping

from subquad.compare.executors.base import Executor, Local
from subquad.compare.executors.ray import Ray
from subquad.compare.executors.slurm import Slurm
from subquad.config import nearest

EXECUTORS: dict[str, type[Executor]] = {"local": Local, "ray": Ray, "slurm": Slurm}


def build_executor(name: str, options: Mapping[str, object] | None = None) -> Executor:
    """The executor of this name, with its options; a wrong name or option is refused with the nearest right one.

    >>> build_executor("ray", {"cpus": "2"}).options.cpus
    2
    """
    if name not in EXECUTORS:
        raise ValueError(f"no executor is called {name!r}; choose {', '.join(EXECUTORS)}{nearest(name, EXECUTORS)}")
    kind = EXECUTORS[name]
    return kind(kind.Options.parse(f"the executor {name}", options or {}))
