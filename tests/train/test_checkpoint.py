"""Checkpoints: bit-exact resume with dropout on, damage by name, fallback, rotation, averages; and the metrics log."""

import json
import random
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from subquad.train.checkpoint import (
    EMA,
    MODEL,
    BestMetric,
    Checkpoint,
    CheckpointRetention,
    TrainState,
    average,
    best,
    checkpoints,
    latest,
    load_checkpoint,
    load_weights_of,
    newest,
    read_state,
    remove_surplus_checkpoints,
    save_checkpoint,
    save_weights,
)
from subquad.train.metrics_log import MetricsLog, read_metrics
from subquad.train.optim import OptimConfig, build_optimizer, optimizer_state, restore_optimizer, set_learning_rate
from subquad.train.rng import rng_state, set_rng_state
from tests.originals.files import FOLDER
from tests.originals.training import check_average


def some_checkpoint(update: int, **state: object) -> Checkpoint:
    weights = {"w": torch.full((3, 2), float(update)), "count": torch.tensor(update)}
    return Checkpoint(weights, {"exp_avg.w": torch.ones(3, 2)}, TrainState(update=update, **state), rng_state())  # type: ignore[arg-type]


def save_some(folder: Path, *updates: int) -> list[Path]:
    return [save_checkpoint(folder, some_checkpoint(update)) for update in updates]


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_resume_is_bit_exact_with_dropout(tmp_path: Path) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 2))
        return model, build_optimizer(OptimConfig(weight_decay=0.1), model)

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, updates: int) -> None:
        for _ in range(updates):
            x = torch.randn(4, 6) + float(np.random.rand()) + random.random()
            optimizer.zero_grad(set_to_none=True)
            model(x).square().sum().backward()
            set_learning_rate(optimizer, 0.01)
            optimizer.step()

    torch.manual_seed(0)
    model, optimizer = build()
    train(model, optimizer, 3)
    random.gauss(0, 1)  # leaves a second number in Python's generator, which is part of its state
    np.random.randn()
    state = TrainState(update=3, epoch=1, cursor={"epoch": 1, "batch": 7}, metrics={"loss": 0.1 + 0.2})
    saved = Checkpoint(dict(model.state_dict()), optimizer_state(optimizer, model), state, rng_state())
    path = save_checkpoint(tmp_path, saved)
    train(model, optimizer, 3)
    drawn = (random.gauss(0, 1), np.random.randn(), torch.randn(1))

    torch.manual_seed(9)
    twin, resumed = build()
    loaded = load_checkpoint(path)
    twin.load_state_dict(loaded.model)
    restore_optimizer(resumed, twin, loaded.optimizer)
    set_rng_state(loaded.rng)
    assert loaded.state == state
    train(twin, resumed, 3)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    assert drawn == (random.gauss(0, 1), np.random.randn(), torch.randn(1))


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "rng.safetensors", "state.json"])
def test_damage_is_named(tmp_path: Path, name: str) -> None:
    (path,) = save_some(tmp_path, 5)
    load_checkpoint(path)
    damage(path / name)
    with pytest.raises(ValueError, match=f"damaged: the checksum of {name} differs"):
        load_checkpoint(path)
    (path / name).unlink()
    with pytest.raises(ValueError, match=f"damaged: {name} is missing"):
        load_checkpoint(path)


def test_damaged_checksums_are_named_too(tmp_path: Path) -> None:
    (path,) = save_some(tmp_path, 5)
    (path / "checksums.json").write_text("{")
    with pytest.raises(ValueError, match=r"checksums.json cannot be read"):
        load_checkpoint(path)
    (path / "checksums.json").write_text("{}")
    with pytest.raises(ValueError, match=r"model.safetensors has no checksum"):
        load_checkpoint(path)
    with pytest.raises(ValueError, match="there is no checkpoint"):
        load_checkpoint(tmp_path / "other")


def test_the_latest_whole_one_is_found(tmp_path: Path) -> None:
    assert latest(tmp_path / "not-there") is None
    first, second, third = save_some(tmp_path, 9, 10, 100)
    assert latest(tmp_path) == third
    damage(third / "model.safetensors")
    (second / "state.json").unlink()
    with pytest.warns(UserWarning, match="trying the one before") as warned:
        assert latest(tmp_path) == first
    assert len(warned) == 2
    damage(first / "rng.safetensors")
    with pytest.warns(UserWarning, match="trying"), pytest.raises(ValueError, match=r"every checkpoint .* damaged"):
        latest(tmp_path)


def test_what_a_killed_writer_left_is_not_a_checkpoint(tmp_path: Path) -> None:
    (path,) = save_some(tmp_path, 1)
    (tmp_path / ".new-update-000000002").mkdir()
    (tmp_path / ".new-update-000000002" / "model.safetensors").write_bytes(b"half")
    path.rename(tmp_path / ".old-update-000000001")  # killed between the two renames of an overwriting save
    save_some(tmp_path, 3)
    assert [p.name for p in checkpoints(tmp_path)] == ["update-000000003", "update-000000001"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["update-000000001", "update-000000003"]


def test_what_does_not_belong_to_a_checkpoint_is_not_used(tmp_path: Path) -> None:
    """A folder by another name, a moving average that came from elsewhere, or one that is gone."""
    first, second = save_some(tmp_path, 4, 5)
    first.rename(tmp_path / "update-000000009")
    with pytest.raises(ValueError, match=r"update-000000009 is damaged: state\.json is of update 4"):
        load_checkpoint(tmp_path / "update-000000009")
    (second / EMA).write_bytes((second / MODEL).read_bytes())
    with pytest.raises(ValueError, match=r"ema\.safetensors has no checksum"):
        load_checkpoint(second)
    with_average = some_checkpoint(6)
    with_average.ema = {"w": torch.arange(3.0)}
    path = save_checkpoint(tmp_path, with_average)
    (path / EMA).unlink()
    with pytest.raises(ValueError, match=r"ema\.safetensors is missing"):
        load_weights_of(path)


def test_a_damaged_state_neither_stops_a_run_nor_counts(tmp_path: Path) -> None:
    for update in (1, 2, 3):
        metrics = {"loss": float(update)}
        save_checkpoint(tmp_path, some_checkpoint(update, epoch=update, epoch_end=True, metrics=metrics))
    state = tmp_path / "update-000000002" / "state.json"
    state.write_text(state.read_text().replace('"loss": 2.0', '"loss": 0.0'))  # it would be the best
    damaged = r"update-000000002 is damaged: the checksum of state\.json differs"
    with pytest.raises(ValueError, match=damaged):
        read_state(state.parent)
    with pytest.raises(ValueError, match=f"{damaged}.*--checkpoint NAME"):
        best(tmp_path, BestMetric())
    with pytest.raises(ValueError, match=damaged):
        newest(tmp_path, 2, epoch_ends=True)
    assert newest(tmp_path, 1, epoch_ends=True) == [tmp_path / "update-000000003"]  # which one is older does not matter
    with pytest.warns(UserWarning, match=damaged):
        assert read_state(best(tmp_path, BestMetric(), skip_damaged=True)[0]).update == 1
    with pytest.warns(UserWarning, match="left out"):
        remove_surplus_checkpoints(tmp_path, CheckpointRetention(keep_last=1, keep_epochs=2), BestMetric())
    assert [path.name for path in checkpoints(tmp_path)] == ["update-000000003", "update-000000001"]


def test_links_to_other_folders_are_followed_but_not_emptied(tmp_path: Path) -> None:
    """Checkpoints that were moved to another disk and linked are used, and rotation removes the links alone."""
    folder, other = tmp_path / "checkpoints", tmp_path / "other"
    for path in save_some(folder, 1, 2):
        shutil.move(path, other / path.name)
        path.symlink_to(other / path.name)
    found = latest(folder)
    assert found is not None
    assert load_checkpoint(found).state.update == 2
    save_some(folder, 2, 3)  # the first of them replaces a link
    assert not (folder / "update-000000002").is_symlink()
    remove_surplus_checkpoints(folder, CheckpointRetention(keep_last=1, keep_best=0), BestMetric())
    assert [path.name for path in folder.iterdir()] == ["update-000000003"]
    assert sorted(path.name for path in other.iterdir()) == ["update-000000001", "update-000000002"]
    assert load_checkpoint(other / "update-000000002").state.update == 2
    elsewhere = tmp_path / "linked"
    elsewhere.symlink_to(folder)
    assert latest(elsewhere) == elsewhere / "update-000000003"


def test_an_average_is_replaced_though_a_killed_process_left_the_old_one(tmp_path: Path) -> None:
    path = save_weights(tmp_path / "average", {"w": torch.zeros(2)}, TrainState())
    shutil.copytree(path, tmp_path / ".old-average")  # killed after the new one had its name
    save_weights(path, {"w": torch.ones(2)}, TrainState())
    assert torch.equal(load_weights_of(path)["w"], torch.ones(2))
    assert [found.name for found in tmp_path.iterdir()] == ["average"]


def test_what_a_disk_does_not_take_is_said_and_removed(tmp_path: Path) -> None:
    save_some(tmp_path, 1)
    with files_up_to(1000), pytest.raises(ValueError, match=r"update-000000002 cannot be written: .*File too large"):
        save_some(tmp_path, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["update-000000001"]


@contextmanager
def files_up_to(size: int) -> Iterator[None]:
    """No file of this process grows beyond so many bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_saving_an_update_again_replaces_it(tmp_path: Path) -> None:
    save_some(tmp_path, 4)
    path = save_checkpoint(tmp_path, some_checkpoint(4, epoch=2))
    assert read_state(path).epoch == 2
    assert checkpoints(tmp_path) == [path]


def test_rotation(tmp_path: Path) -> None:
    losses = {10: 3.0, 20: 1.0, 30: 2.0, 40: float("nan"), 50: 2.5, 60: 4.0}
    for update, loss in losses.items():
        state = {"epoch": update // 20, "epoch_end": update % 20 == 0, "metrics": {"loss": loss}}
        save_checkpoint(tmp_path, some_checkpoint(update, **state))

    def left() -> list[int]:
        return sorted(read_state(path).update for path in checkpoints(tmp_path))

    assert [read_state(path).update for path in best(tmp_path, BestMetric())] == [20, 30, 50, 10, 60]
    rules = CheckpointRetention(keep_last=2, keep_best=1, keep_epochs=2, keep_every=30)
    removed = remove_surplus_checkpoints(tmp_path, rules, BestMetric())
    assert [read_only.name for read_only in removed] == ["update-000000010"]
    assert left() == [20, 30, 40, 50, 60]
    remove_surplus_checkpoints(tmp_path, CheckpointRetention(keep_last=1, keep_best=2), BestMetric())
    assert left() == [20, 30, 60]
    remove_surplus_checkpoints(tmp_path, CheckpointRetention(keep_last=1, keep_best=1), BestMetric(better="higher"))
    assert left() == [60]


def test_averaging_as_fairseq() -> None:
    check_average(json.loads((FOLDER / "fairseq" / "average_checkpoints.json").read_text()))


def test_averaging_needs_enough_checkpoints_of_one_model(tmp_path: Path) -> None:
    paths = save_some(tmp_path, 1, 2)
    with pytest.raises(ValueError, match="holds 2 checkpoints, fewer than the 3"):
        newest(tmp_path, 3)
    other = some_checkpoint(3)
    other.model["extra"] = torch.ones(1)
    with pytest.raises(ValueError, match=r"another model .* 'extra'"):
        average([*paths, save_checkpoint(tmp_path, other)])
    with pytest.raises(ValueError, match="at least one"):
        average([])


def test_moving_averages_travel_along(tmp_path: Path) -> None:
    checkpoint = some_checkpoint(1)
    checkpoint.ema = {"w": torch.arange(3.0)}
    path = save_checkpoint(tmp_path, checkpoint)
    loaded = load_checkpoint(path).ema
    assert loaded is not None
    assert torch.equal(loaded["w"], torch.arange(3.0))
    assert torch.equal(average([path], ema=True)["w"], torch.arange(3.0))


def test_tensors_that_share_memory_are_saved(tmp_path: Path) -> None:
    """A transposed or shared tensor must not stop a run at its first checkpoint."""
    base = torch.arange(6.0).reshape(2, 3)
    tensors: dict[str, Tensor] = {"a": base, "b": base, "c": base.T}
    path = save_checkpoint(tmp_path, Checkpoint(tensors, {}, TrainState(), {}))
    assert torch.equal(load_checkpoint(path).model["c"], base.T)


# ---------------------------------------------------------------------- logs


def test_metrics_survive_a_kill_and_a_resume(tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    log = MetricsLog(path)
    for update in (10, 20, 30):
        log.write("train", update, {"loss": 1 / update})
    log.write("valid", 20, {"loss": float("nan")})
    with path.open("a") as file:
        file.write('{"event": "tra')  # the process was killed here
    assert len(read_metrics(path)) == 4
    again = MetricsLog(path)
    again.resumed(20)
    again.write("train", 30, {"loss": torch.tensor(0.5)})
    assert [(r["update"], r["loss"]) for r in read_metrics(path, "train")] == [(10, 0.1), (20, 0.05), (30, 0.5)]
    assert read_metrics(path, "valid")[0]["loss"] == "nan"
    for damaged in ("no json\n", "[1]\n", '{"evenu": "train", "update": 1}\n'):
        path.write_text(damaged)
        with pytest.raises(ValueError, match="line 1"):
            read_metrics(path)


def test_half_a_line_of_metrics_is_taken_back(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    log.write("train", 1, {"loss": 1.0})
    with files_up_to(path.stat().st_size + 5), pytest.raises(OSError, match="metrics cannot be written"):
        log.write("train", 2, {"loss": 0.5})
    log.write("train", 2, {"loss": 0.5})
    assert [record["update"] for record in read_metrics(path)] == [1, 2]
