"""What processes agree on: a name in a store with words of earlier attempts, and the files of a run directory."""

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from subquad.train import agreement
from subquad.train.agreement import agree_on_checkpoint, agree_on_name, file_sizes, share_files, wait_for_files
from subquad.train.checkpoint import Checkpoint, TrainState, save_checkpoint
from subquad.train.distributed import Workers


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
    monkeypatch.setattr(agreement, "PATIENCE", timedelta(seconds=0.3))
    store = dist.HashStore()
    store.set("subquad word 1", "of a process that has died")
    with pytest.raises(ValueError, match=r"processes \[1\] of 2 did not come within 0:00:00.3"):
        agree_on_name(store, 0, 2)
    monkeypatch.setattr(agreement, "PATIENCE", timedelta(seconds=20))
    assert len(set(meet(store, [1, 0], 2).values())) == 1


def test_the_first_process_may_prepare_data_for_longer_than_an_exchange_may_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(agreement, "PATIENCE", timedelta(seconds=0.1))
    store, names = dist.HashStore(), []
    other = threading.Thread(target=lambda: names.append(agree_on_name(store, 1, 2)), daemon=True)
    other.start()
    time.sleep(0.4)
    assert other.is_alive()
    monkeypatch.setattr(agreement, "PATIENCE", timedelta(seconds=20))
    names.append(agree_on_name(store, 0, 2))
    other.join(20)
    assert len(names) == 2
    assert len(set(names)) == 1


# ---------------------------------------------------------------------- files


class Pair(Workers):
    """One of two processes, which are threads here."""

    said: list[Any]
    together: threading.Barrier

    def all_gather(self, content: Any) -> list[Any]:
        self.together.wait(20)
        self.said[self.rank] = content
        self.together.wait(20)
        return list(self.said)


def run_both(work: Callable[[Workers], Any]) -> list[Any]:
    """work(workers) in both processes; a ValueError is a result."""
    results: list[Any] = [None, None]
    said, together = [None, None], threading.Barrier(2)

    def call(rank: int) -> None:
        workers = Pair(rank, 2)
        object.__setattr__(workers, "said", said)
        object.__setattr__(workers, "together", together)
        try:
            results[rank] = work(workers)
        except ValueError as error:
            results[rank] = error

    threads = [threading.Thread(target=call, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def save(folder: Path, update: int) -> None:
    save_checkpoint(folder, Checkpoint({}, {}, TrainState(update), rng={}))


def test_all_go_on_from_the_checkpoint_that_the_first_process_sees(tmp_path: Path, monkeypatch) -> None:
    """The second one sees an older one alone, as a network may show it, and would have trained on with its weights."""
    monkeypatch.setattr(agreement, "VISIBLE_WITHIN", 20.0)
    for name in ("first", "second"):
        save(tmp_path / name, 3)
    save(tmp_path / "first", 6)

    def choose(workers: Workers) -> Path | None:
        if not workers.is_rank_zero:
            threading.Timer(0.5, save, (tmp_path / "second", 6)).start()
        return agree_on_checkpoint(tmp_path / ("first" if workers.is_rank_zero else "second"), workers)

    assert [path.name for path in run_both(choose)] == ["update-000000006", "update-000000006"]


def test_a_folder_that_is_not_shared_is_refused(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(agreement, "VISIBLE_WITHIN", 0.3)
    save(tmp_path / "first", 6)
    found = run_both(lambda workers: agree_on_checkpoint(tmp_path / ("first", "second")[workers.rank], workers))
    assert isinstance(found[1], ValueError)
    assert "must be in a folder that all machines share" in str(found[1])


def test_new_runs_have_no_checkpoint(tmp_path: Path) -> None:
    assert run_both(lambda workers: agree_on_checkpoint(tmp_path / "none", workers)) == [None, None]


def test_files_are_waited_for_until_they_have_their_size(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "tokens").write_bytes(b"1234")
    (tmp_path / "data" / ".tokens.unfinished").write_bytes(b"12")
    expected = file_sizes(tmp_path, ["data", "inputs.json"])
    assert expected == {"data/tokens": 4}
    (tmp_path / "data" / "tokens").write_bytes(b"")
    threading.Timer(0.4, (tmp_path / "data" / "tokens").write_bytes, (b"1234",)).start()
    begun = time.monotonic()
    wait_for_files(tmp_path, expected, 20)
    assert time.monotonic() - begun > 0.2
    run_both(lambda workers: share_files(tmp_path, ["data"], workers))
