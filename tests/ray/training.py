"""What the tests of training share."""

import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from ray_eagle.run import LOGS, RunFolder
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
    rows = logs.read_jsonl(HISTORY) if logs.exists(HISTORY) else []
    return [{k: v for k, v in row.items() if k not in ("tokens_per_second", "mfu")} for row in rows]


def same(one: Path, other: Path) -> bool:
    """The same curve and the same exported drafter, bit for bit."""
    a, b = weights(one), weights(other)
    return curve(one) == curve(other) and a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
