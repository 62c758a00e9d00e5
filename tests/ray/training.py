"""What the tests of training share."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ray_eagle.config import Config
from ray_eagle.run import LOGS, RunFolder
from ray_eagle.target.loading import read_facts
from ray_eagle.training.loop import Trainer, TrainJob
from ray_eagle.training.trackers import HISTORY

DETERMINISTIC: dict[str, Any] = {"deterministic": True, "checkpoint_every": 3, "epochs": 3}


def fresh(captured: Path, to: Path) -> Path:
    """A copy of that run, before training."""
    for name in ("conversations", "hidden_states", "vocab"):
        shutil.copytree(captured / "run" / name, to / "run" / name)
    shutil.copy(captured / "prompts.jsonl", to / "prompts.jsonl")
    return to


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "run" / "drafter" / "model.safetensors")


def curve(folder: Path) -> list[dict[str, float]]:
    """Rows of the log but for what the clock decides; none before the first."""
    logs = RunFolder.open(str(folder / "run")).folder(LOGS)
    return without_clock(logs.read_jsonl(HISTORY)) if logs.exists(HISTORY) else []


def without_clock(rows: list[dict[str, float]]) -> list[dict[str, float]]:
    return [{k: v for k, v in row.items() if k not in ("tokens_per_second", "mfu")} for row in rows]


def train_here(
    config: Config,
    steps: int | None = None,
    at_checkpoint: Callable[[Trainer, dict[str, float]], None] = lambda trainer, figures: None,
) -> Trainer:
    """One worker's training in this process, without Ray Train; up to `steps`."""
    trainer = Trainer(TrainJob(config, RunFolder.open(config.run), read_facts(config.target)))
    while trainer.step < (trainer.total_steps if steps is None else steps):
        trainer.train_step()
        if trainer.at_checkpoint():
            at_checkpoint(trainer, trainer.validate())
    trainer.close()
    torch.use_deterministic_algorithms(False)
    return trainer


def assert_close(one: list[dict[str, float]], other: list[dict[str, float]]) -> None:
    """Two curves, to float tolerance."""
    assert [row["step"] for row in one] == [row["step"] for row in other]
    for a, b in zip(one, other, strict=True):
        assert a.keys() == b.keys()
        assert a == pytest.approx(b, rel=1e-4, abs=1e-6)


def same(one: Path, other: Path) -> bool:
    """The same curve and the same exported drafter, bit for bit."""
    a, b = weights(one), weights(other)
    return curve(one) == curve(other) and a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
