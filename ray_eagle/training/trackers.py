"""The curves of a run: logs/train.jsonl, gauges on the Ray dashboard, and the trackers that the settings name.

A tracker is opened at its first row and closed at the end; a resumed run goes on in the same one. The file is written whole, on
every filesystem alike, and therefore the more seldom the longer it is.
"""

import hashlib
import importlib.util
import json
from collections.abc import Callable
from time import monotonic
from typing import Any, Protocol

from ray_eagle.errors import ConfigError, explain
from ray_eagle.run import LOGS, Folder, RunFolder

HISTORY = "train.jsonl"
PROJECT = "ray_eagle"
MLFLOW_RUN = "mlflow.json"
PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow"}
COUNTERS = ("step", "steps")
PAUSE = 50
"""Times as long as the last write of the file took, the next one waits: a fiftieth of the run goes into it, however long."""


class Tracker(Protocol):
    """Where figures go."""

    def log(self, step: int, figures: dict[str, float]) -> None:
        """Figures of one step, by name."""

    def close(self) -> None:
        """Everything is written."""


def check_trackers(names: tuple[str, ...]) -> None:
    """Raises ConfigError for a tracker whose package is not installed."""
    for name in names:
        if importlib.util.find_spec(PACKAGES[name]) is None:
            raise ConfigError(
                explain(
                    "train.trackers",
                    where=name,
                    expected=f"the package {PACKAGES[name]}",
                    found="none",
                    fix=f"Install it where training runs: pip install 'ray-eagle[{name}]', or leave {name} out.",
                )
            )


class TensorBoard:
    """Event files in logs/tensorboard."""

    def __init__(self, logs: Folder, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # rows of a killed run from `first_step` on are logged again, and hidden here
        self.writer = SummaryWriter(logs.file("tensorboard"), purge_step=first_step)

    def log(self, step: int, figures: dict[str, float]) -> None:
        for name, value in figures.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


class Wandb:
    """One run of the project `ray_eagle` for each run folder; WANDB_* variables say where."""

    def __init__(self, logs: Folder, first_step: int) -> None:
        import wandb

        name = logs.place("").rstrip("/")
        identity = hashlib.blake2b(name.encode(), digest_size=8).hexdigest()
        self.run = wandb.init(project=PROJECT, id=identity, name=name, resume="allow")

    def log(self, step: int, figures: dict[str, float]) -> None:
        self.run.log(figures, step=step)

    def close(self) -> None:
        self.run.finish()


class Mlflow:
    """One run of the experiment `ray_eagle` for each run folder; MLFLOW_TRACKING_URI says where."""

    def __init__(self, logs: Folder, first_step: int) -> None:
        from mlflow.tracking import MlflowClient

        self.client = MlflowClient()
        if logs.exists(MLFLOW_RUN):
            self.run = logs.read_json(MLFLOW_RUN)["run"]
            return
        found = self.client.get_experiment_by_name(PROJECT)
        experiment = found.experiment_id if found else self.client.create_experiment(PROJECT)
        self.run = self.client.create_run(experiment, run_name=logs.place("").rstrip("/")).info.run_id
        logs.write_json(MLFLOW_RUN, {"run": self.run})

    def log(self, step: int, figures: dict[str, float]) -> None:
        for name, value in figures.items():
            self.client.log_metric(self.run, name, value, step=step)

    def close(self) -> None:
        self.client.set_terminated(self.run)


OPEN: dict[str, Callable[[Folder, int], Tracker]] = {"tensorboard": TensorBoard, "wandb": Wandb, "mlflow": Mlflow}


class History:
    """The rows of the log, kept on one worker."""

    def __init__(self, run: RunFolder, trackers: tuple[str, ...] = ("tensorboard",)) -> None:
        self.folder = run.folder(LOGS)
        self.folder.create()
        # TensorBoard's events are files that are appended to, which an object store has not
        self.names = [name for name in trackers if name != "tensorboard" or self.folder.is_local]
        self.rows: list[dict[str, float]] = []
        self.trackers: list[Tracker] | None = None
        self.gauges: dict[str, Any] = {}
        self.due = 0.0
        """From when on a new row is written to the file at once."""

    def add(self, row: dict[str, float]) -> None:
        from ray.util.metrics import Gauge

        self.rows.append(row)
        if monotonic() >= self.due:
            self.write()
        if self.trackers is None:
            self.trackers = [OPEN[name](self.folder, int(row["step"])) for name in self.names]
        for tracker in self.trackers:
            tracker.log(int(row["step"]), {name: value for name, value in row.items() if name not in COUNTERS})
        for name, value in row.items():
            if name not in self.gauges:
                self.gauges[name] = Gauge(f"eagle_train_{name}", description=f"{name} of the training run")
            self.gauges[name].set(value)

    def write(self) -> None:
        """Have the file hold every row."""
        began = monotonic()
        self.folder.write_jsonl(HISTORY, self.rows)
        ended = monotonic()
        self.due = ended + PAUSE * (ended - began)

    def close(self) -> None:
        if self.rows:
            self.write()
        for tracker in self.trackers or []:
            tracker.close()
        self.trackers = None

    def save(self) -> str:
        """What a checkpoint keeps of it; the file holds every row then."""
        self.write()
        return json.dumps(self.rows)

    def restore(self, text: str) -> None:
        """Go back to the rows of a checkpoint: what a killed worker logged after it is logged again."""
        self.rows = json.loads(text)
        self.write()
