"""Started by test_distributed in each of two processes: what only the processes themselves can see."""

import hashlib
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from subquad.train.distributed import Workers, full_tensor, gather_to_first, join, leave
from subquad.train.nan_diagnosis import NotFiniteError, load_failure
from subquad.train.optim import clip_gradients, optimizer_state
from subquad.train.trainer import Trainer
from tests.train.test_trainer import recipe, trainer

FIRST = "encoder.blocks.0.ffn.fc2.weight"


def made(folder: Path, workers: Workers, sharded: bool, **stack: Any) -> Trainer:
    """A trainer of the digits, with dropout, in a folder of each process's own."""
    given = recipe("image-classification", updates=99, accumulate=2, sharded=sharded)
    encoder = {**given.model["encoder"], **stack}
    given = given.model_copy(update={"model": {**given.model, "encoder": encoder}})
    return trainer(given, folder / f"{sharded}-{workers.rank}", workers=workers)


def check_weights(folder: Path, workers: Workers, sharded: bool) -> None:
    """Processes draw other numbers for dropout (and skip other blocks), and still hold the same weights."""
    trained = made(folder, workers, sharded, layers=3, **({} if sharded else {"layer_drop": 0.4}))
    updates = trained.updates()
    drawn = hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest()
    assert len(set(said(workers, drawn))) == workers.world
    for _ in range(4):
        next(updates)
    weights = b"".join(full_tensor(value.detach()).numpy().tobytes() for value in trained.model.state_dict().values())
    assert len(set(said(workers, hashlib.sha256(weights).hexdigest()))) == 1
    gathered = (
        gather_to_first(trained.model.state_dict(), workers),
        optimizer_state(trained.updater.optimizer, trained.model, workers),
    )
    for tensors in gathered:  # what a checkpoint holds is the first process's alone
        assert bool(tensors) == workers.is_rank_zero
        assert all(value.device.type == "cpu" and full_tensor(value) is value for value in tensors.values())


def said(workers: Workers, text: str) -> list[str]:
    """What each process said."""
    return [content.decode() for content in workers._all_gather_bytes(text.encode())]


def check_norms(folder: Path, workers: Workers) -> None:
    """The norm of sharded gradients is that of the whole ones, before and after clipping."""
    trained = made(folder / "norms", workers, sharded=True)
    next(trained.updates())
    parameters = list(trained.model.parameters())
    for limit in (0.0, 1e-3):
        gradients = [full_tensor(p.grad).flatten() for p in parameters if p.grad is not None]
        expected = torch.cat(gradients).double().norm()
        torch.testing.assert_close(clip_gradients(parameters, limit).double(), expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(clip_gradients(parameters), torch.tensor(1e-3), rtol=1e-3, atol=0)


def check_failures(folder: Path, workers: Workers, sharded: bool) -> None:
    """A weight that is not finite stops every process before the update; each can replay its own batch."""
    trained = made(folder / "failures", workers, sharded)
    with torch.no_grad():
        trained.model.get_parameter(FIRST).fill_(torch.inf)
    with pytest.raises(NotFiniteError) as caught:
        next(trained.updates())
    assert caught.value.culprit is not None
    assert caught.value.culprit.name == FIRST
    batch, _, _ = load_failure(caught.value.folder)
    assert set(batch) == {"images", "labels"}


def main() -> None:
    workers = join()
    with tempfile.TemporaryDirectory() as name:
        for sharded in (False, True):
            check_weights(Path(name), workers, sharded)
            check_failures(Path(name), workers, sharded)
        check_norms(Path(name), workers)
    workers.barrier()
    leave()
    print("all is well", flush=True)


if __name__ == "__main__":
    main()
