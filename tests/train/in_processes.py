"""Started by test_distributed in each of two processes: what only the processes themselves can see."""

import gc
import hashlib
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from subquad.train.diagnostics.nan_diagnosis import NotFiniteError, load_failure
from subquad.train.distributed import (
    LossModule,
    Workers,
    full_tensor,
    gather_to_first,
    join,
    leave,
    shard,
    validate,
)
from subquad.train.optim import build_optimizer, clip_gradients, optimizer_state
from subquad.train.run import train_run
from subquad.train.trainer import Trainer
from tests.train.test_trainer import recipe, trainer

FIRST = "encoder.blocks.0.ffn.fc2.weight"


def made(folder: Path, workers: Workers, sharded: bool, precision: str = "float32", **stack: Any) -> Trainer:
    """A trainer of the digits, with dropout, in a folder of each process's own."""
    given = recipe("image-classification", updates=99, accumulate=2, sharded=sharded, precision=precision)
    encoder = {**given.model["encoder"], **stack}
    given = given.model_copy(update={"model": {**given.model, "encoder": encoder}})
    return trainer(given, folder / f"{sharded}-{workers.rank}", workers=workers)


def check_weights(folder: Path, workers: Workers, sharded: bool) -> None:
    """Processes draw other numbers for dropout (and skip other blocks), and still hold the same weights."""
    stack: dict[str, Any] = {"layers": 3} if sharded else {"layers": 3, "layer_drop": 0.4}
    trained = made(folder, workers, sharded, **stack)
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


def check_unused(folder: Path, workers: Workers) -> None:
    """DDP looks for parameters without a gradient only where there may be some, and no draw shows that it was asked."""
    drawn = set()
    stacks: list[tuple[dict[str, Any], bool]] = [
        ({}, False),
        ({"layer_drop": 0.4}, True),
        ({"mixer": {"name": "primal", "rank": 4}}, True),  # its regulariser does not count
    ]
    for number, (stack, unused) in enumerate(stacks):
        trained = made(folder / f"unused{number}", workers, sharded=False, **stack)
        assert isinstance(trained.loss.module, DistributedDataParallel)
        assert trained.loss.module.find_unused_parameters == unused, stack
        assert all(parameter.grad is None for parameter in trained.model.parameters())
        drawn.add(float(torch.rand(())))
        next(trained.updates())
    assert len(drawn) == 1


def check_narrow_shards(folder: Path, workers: Workers) -> None:
    """Blocks are gathered in bfloat16, and train as replicas do under autocast; weights stay float32.

    Only on GPUs, whose autocast computes layer norms in float32 whatever they are given. Here it does so, too.
    """
    library = torch.library.Library("aten", "IMPL")
    library.impl("layer_norm", layer_norm_of_a_gpu, "AutocastCPU")
    losses = []
    for dtype in (None, torch.bfloat16):
        trained = made(folder / f"narrow{dtype}", workers, False, "bfloat16", dropout=0.0, layers=2)
        loss = trained.loss
        module = shard(LossModule(loss.model, loss.loss, torch.bfloat16), workers, dtype)
        trained.loss.module, trained.loss.sharded = module, True
        trained.updater.optimizer = build_optimizer(trained.recipe.optim, trained.model)
        trained.updater.ema = None
        updates = trained.updates()
        for _ in range(3):
            next(updates)
        assert all(parameter.dtype == torch.float32 for parameter in trained.model.parameters())
        losses.append(validate(trained.task, trained.loss, trained.loader, "valid")["loss"])
    assert losses[1] == pytest.approx(losses[0], rel=0.01)
    assert losses[1] != losses[0]


def layer_norm_of_a_gpu(
    x: Tensor, shape: list[int], weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5, *_: bool
) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        weight, bias = (None if part is None else part.float() for part in (weight, bias))
        return torch.nn.functional.layer_norm(x.float(), shape, weight, bias, eps)


def check_parting(folder: Path, workers: Workers) -> None:
    """When processes part, no replica is left: the last to hold their group would wait for its threads for ever."""
    gc.collect()
    left: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("subquad.train.run.leave", lambda: left.append(count_replicas()))
        before = count_replicas()
        shared = Path(said(workers, str(folder))[0]) / "run"
        train_run(recipe("image-classification", updates=2, accumulate=2), shared, quiet=True)
    assert left == [before]


def count_replicas() -> int:
    return sum(isinstance(one, DistributedDataParallel) for one in gc.get_objects())


def main() -> None:
    workers = join()
    with tempfile.TemporaryDirectory() as name:
        for sharded in (False, True):
            check_weights(Path(name), workers, sharded)
            check_failures(Path(name), workers, sharded)
        check_norms(Path(name), workers)
        check_unused(Path(name), workers)
        check_narrow_shards(Path(name), workers)
        check_parting(Path(name), workers)
    workers.barrier()
    leave()
    print("all is well", flush=True)


if __name__ == "__main__":
    main()
