"""How processes find one another in a store in which earlier attempts have left their words."""

import threading
from datetime import timedelta

import pytest
import torch.distributed as dist

from subquad.train import rendezvous
from subquad.train.rendezvous import agree_on_name


def meet(store: dist.Store, ranks: list[int], world: int) -> dict[int, str]:
    """The names that processes of these ranks, which are threads here, have agreed on."""
    names: dict[int, str] = {}
    threads = [
        threading.Thread(target=lambda rank=rank: names.update({rank: agree_on_name(store, rank, world)}), daemon=True)
        for rank in ranks
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return names


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0]])
def test_every_attempt_has_a_name_of_its_own(order: list[int]) -> None:
    """Whoever comes first, and however often they have met before, in one store."""
    store = dist.HashStore()
    names = [meet(store, order, 3) for _ in range(3)]
    assert all(len(set(found.values())) == 1 and len(found) == 3 for found in names)
    assert len({found[0] for found in names}) == 3


def test_words_of_the_dead_are_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that died before the others came has left a word; its successor alone is waited for."""
    monkeypatch.setattr(rendezvous, "PATIENCE", timedelta(seconds=0.3))
    store = dist.HashStore()
    store.set("subquad word 1", "of a process that has died")
    with pytest.raises(ValueError, match=r"processes \[1\] of 2 did not come within 0:00:00.3"):
        agree_on_name(store, 0, 2)
    monkeypatch.setattr(rendezvous, "PATIENCE", timedelta(seconds=20))
    assert len(set(meet(store, [1, 0], 2).values())) == 1
