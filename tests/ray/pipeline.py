"""A whole run on a tiny random target, for the tests that need real stages."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ray_eagle.config import Config
from ray_eagle.hidden_states.dataset import read_plan, read_records
from ray_eagle.progress import Silent
from ray_eagle.run import RunFolder
from ray_eagle.settings import load_config
from ray_eagle.stages import Pipeline

TOPICS = ("a red boat", "why rain falls", "two prime numbers", "the old clock", "bread and salt", "a map of the moon")


def write_prompts(path: Path, count: int = 40) -> Path:
    """Short prompts with ids; every fifth has two turns."""
    rows = [
        {
            "id": f"p{i}",
            "category": ("chat", "code")[i % 2],
            "turns": [f"{i * 37 % 101}: {TOPICS[i % 6]}", "and more?"][: 1 + (i % 5 == 0)],
        }
        for i in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def tiny_config(folder: Path, target: Path, **sections: dict[str, Any]) -> Config:
    """Settings of a run in `folder` that takes seconds; `sections` override."""
    prompts = folder / "prompts.jsonl"
    if not prompts.exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_prompts(prompts)
    settings: dict[str, dict[str, Any]] = {
        "target": {"path": str(target), "dtype": "float32"},
        "generate": {
            "prompts": str(prompts),
            "max_new_tokens": 16,
            "batch_size": 4,
            "part_size": 10,
            "held_out_share": 0.2,
            "validation_share": 0.2,
            "near_duplicate": 0.9,
        },
        "extract": {"unit_mib": 0.05, "state_dtype": "float32", "tokens_per_batch": 128},
        "vocab": {"size": 100},
        "train": {"epochs": 2, "lr": 1e-3, "tokens_per_pack": 128, "report_every": 1, "compute_dtype": "float32"},
        "probe": {"max_new_tokens": 16, "plain_prompts": 2, "resamples": 200},
        "breakeven": {"steps": [1, 2], "prompts": 1, "max_new_tokens": 6},
        "preflight": {"min_free_gib": 0},
    }
    for name, values in sections.items():
        settings[name] = {**settings.get(name, {}), **values}
    return load_config().config.model_validate({"run": str(folder / "run"), **settings})


class Watch(Silent):
    """Calls back on every advance of a task, and keeps what was said."""

    def __init__(self, on_advance: Callable[[str, float], None] = lambda task, amount: None) -> None:
        self.on_advance, self.task, self.said = on_advance, "", [""]

    def start(self, task: str, total: float, unit: str, done: float = 0) -> None:
        self.task = task

    def advance(self, amount: float, note: str = "") -> None:
        if amount:
            self.on_advance(self.task, amount)

    def say(self, message: str) -> None:
        self.said.append(message)


def pipeline(config: Config, progress: Any = None) -> Pipeline:
    run = RunFolder.open(config.run)
    run.create()
    return Pipeline(config, run, progress or Watch())


def start_after_generate(generated: Path, to: Path) -> Path:
    """A folder whose run starts after the `generate` of another one."""
    shutil.copytree(generated / "run" / "conversations", to / "run" / "conversations")
    shutil.copy(generated / "prompts.jsonl", to / "prompts.jsonl")
    return to


def committed(folder: Path) -> dict[int, bytes]:
    """Bytes of every committed shard of the run in a folder."""
    states = RunFolder.open(str(folder / "run")).of("extract")
    return {unit: states.read_bytes(record.file) for unit, record in read_records(states, read_plan(states)).items()}


def ray_processes(name: str) -> list[int]:
    """Pids of this session's own Ray workers whose title contains `name`: children of the raylet that this process started."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                title = (entry / "cmdline").read_bytes().decode(errors="replace")
                parent = _parent(int(entry.name))
                if name in title and _parent(parent) == os.getpid():
                    found.append(int(entry.name))
            except (OSError, ValueError):
                continue
    return found


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
