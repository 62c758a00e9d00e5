"""Where the curves go: event files that a resumed run goes on in, and packages that may be missing."""

import json
import sys
from pathlib import Path
from typing import Any

import pyarrow.fs as pafs
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from ray_eagle.config import TrainConfig
from ray_eagle.errors import ConfigError
from ray_eagle.progress import Silent
from ray_eagle.run import LOGS, Folder, RunFolder
from ray_eagle.training import trackers
from ray_eagle.training.trackers import HISTORY, History, Mlflow, TensorBoard, Wandb, check_trackers
from ray_eagle.training.train import _Follow

WANDB = """
import json
class Run:
    def log(self, figures, step): note(["log", figures, step])
    def finish(self): note(["finish"])
def note(line): open(PLACE, "a").write(json.dumps(line) + "\\n")
def init(project, id, name, resume): note(["init", project, id, name, resume]); return Run()
"""
MLFLOW = """
import json
from types import SimpleNamespace as Named
class MlflowClient:
    def get_experiment_by_name(self, name): return None
    def create_experiment(self, name): note(["experiment", name]); return "7"
    def create_run(self, experiment, run_name): note(["run", experiment, run_name]); return Named(info=Named(run_id="r1"))
    def log_metric(self, run, name, value, step): note(["metric", run, name, value, step])
    def set_terminated(self, run): note(["end", run])
def note(line): open(PLACE, "a").write(json.dumps(line) + "\\n")
"""


class Slow(Folder):
    """Takes a millisecond of a clock of its own to write a row, and counts."""

    now = 0.0
    spent = 0.0
    reads = 0

    def write_jsonl(self, name: str, rows: list[Any]) -> None:
        self.now += len(rows) / 1000
        self.spent += len(rows) / 1000
        super().write_jsonl(name, rows)

    def read_jsonl(self, name: str) -> list[Any]:
        self.reads += 1
        return super().read_jsonl(name)


def slow(folder: Folder) -> Slow:
    return Slow(folder.fs, folder.path, folder.uri)


def row(step: int) -> dict[str, float]:
    return {"step": step, "steps": 600, "epoch": 1, "predicted_acceptance_length": 1.0 + step}


def test_writing_the_log_takes_a_small_share_of_a_run_however_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row each second for ten minutes: to write all of them at each would take three."""
    history = History(RunFolder.open(str(tmp_path)), ())
    history.folder = folder = slow(history.folder)
    monkeypatch.setattr(trackers, "monotonic", lambda: folder.now, raising=False)
    behind = 0.0
    for step in range(1, 601):
        folder.now += 1
        history.add(row(step))
        found = folder.read_jsonl(HISTORY)
        assert found == history.rows[: len(found)]
        behind = max(behind, (step - len(found)) / step)
    assert folder.spent < 0.02 * folder.now
    assert behind < 0.06, "what is missing in the file is a small share of the run, too"
    history.close()
    assert folder.read_jsonl(HISTORY) == history.rows and len(history.rows) == 600


def test_at_a_checkpoint_the_log_holds_every_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "PAUSE", 10**9)
    run = RunFolder.open(str(tmp_path))
    logs = run.folder(LOGS)
    history = History(run, ())
    for step in range(1, 6):
        history.add(row(step))
    assert len(logs.read_jsonl(HISTORY)) == 1, "the test is of rows that wait"
    kept = history.save()
    assert logs.read_jsonl(HISTORY) == [row(step) for step in range(1, 6)]
    history.add(row(6))
    resumed = History(run, ())
    resumed.restore(kept)
    assert logs.read_jsonl(HISTORY) == [row(step) for step in range(1, 6)]
    resumed.add(row(6))
    resumed.close()
    assert logs.read_jsonl(HISTORY) == [row(step) for step in range(1, 7)]


@pytest.mark.parametrize("elsewhere", [False, True], ids=["local", "elsewhere"])
def test_the_driver_reads_the_log_when_it_changed(tmp_path: Path, elsewhere: bool) -> None:
    class Bar(Silent):
        done = 0.0

        def start(self, task: str, total: float, unit: str, done: float = 0) -> None:
            self.done = done

        def advance(self, amount: float, note: str = "") -> None:
            self.done += amount

    place = (
        Folder(pafs.SubTreeFileSystem(str(tmp_path), pafs.LocalFileSystem()), "run")
        if elsewhere
        else Folder.at(tmp_path)
    )
    place.folder(LOGS).create()
    follow = _Follow(RunFolder(place.fs, place.path), bar := Bar(), done=2)
    follow.folder = folder = slow(follow.folder)
    follow._show()
    assert folder.reads == 0, "there is none yet"
    for reads, steps in ((1, 3), (2, 4), (3, 7)):
        folder.write_jsonl(HISTORY, [row(step) for step in range(1, steps + 1)])
        for _ in range(3):
            follow._show()
        assert (folder.reads, bar.done) == (reads, steps)
    folder.delete_file(HISTORY)
    follow._show()


def test_a_resumed_run_replaces_what_the_killed_one_logged_after_its_checkpoint(tmp_path: Path) -> None:
    logs = Folder.at(tmp_path)
    killed = TensorBoard(logs, 1)
    for step in range(1, 8):
        killed.log(step, {"loss_0": 100.0 + step})
    killed.close()
    resumed = TensorBoard(logs, 5)
    for step in range(5, 11):
        resumed.log(step, {"loss_0": 200.0 + step})
    resumed.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    found = [(event.step, event.value) for event in events.Scalars("loss_0")]
    assert found == [(s, 100.0 + s) for s in range(1, 5)] + [(s, 200.0 + s) for s in range(5, 11)]


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_tracker_that_is_not_installed_is_named_with_its_extra(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_trackers(("tensorboard",))
    monkeypatch.setattr(sys, "path", [p for p in sys.path if not (Path(p) / name).exists()])
    monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(ConfigError, match=rf"train.trackers: {name}: expected .*pip install 'ray-eagle\[{name}\]'"):
        check_trackers(("tensorboard", name))


def test_only_known_trackers_may_be_named() -> None:
    assert TrainConfig(trackers=()).trackers == ()
    with pytest.raises(ValueError, match="trackers"):
        TrainConfig.model_validate({"trackers": ["comet"]})


def test_fewer_workers_than_the_fewest_are_refused() -> None:
    assert TrainConfig(workers=4, min_workers=4).min_workers == 4
    with pytest.raises(ValueError, match="min_workers is 3, more than workers, 2"):
        TrainConfig(workers=2, min_workers=3)


def test_wandb_goes_on_in_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for the package, with the signatures of its documentation."""
    lines = stand_in(tmp_path, monkeypatch, "wandb.py", WANDB)
    for step in (1, 2):
        tracker = Wandb(Folder.at(tmp_path / "run" / "logs"), step)
        tracker.log(step, {"loss_0": 0.5})
        tracker.close()
    first, log, finish, second, _, _ = lines()
    assert (
        first == second and first[0] == "init" and first[-1] == "allow" and first[3] == str(tmp_path / "run" / "logs")
    )
    assert log == ["log", {"loss_0": 0.5}, 1] and finish == ["finish"]
    Wandb(Folder.at(tmp_path / "other" / "logs"), 1)
    assert lines()[-1][2] != first[2], "another run folder is another run"


def test_mlflow_goes_on_in_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for the package, with the signatures of its documentation."""
    (tmp_path / "mlflow").mkdir()
    (tmp_path / "mlflow" / "__init__.py").touch()
    lines = stand_in(tmp_path, monkeypatch, "mlflow/tracking.py", MLFLOW)
    for step in (1, 2):
        tracker = Mlflow(Folder.at(tmp_path / "run" / "logs"), step)
        tracker.log(step, {"loss_0": 0.5})
        tracker.close()
    assert lines() == [
        ["experiment", "ray_eagle"],
        ["run", "7", str(tmp_path / "run" / "logs")],
        ["metric", "r1", "loss_0", 0.5, 1],
        ["end", "r1"],
        ["metric", "r1", "loss_0", 0.5, 2],
        ["end", "r1"],
    ]


def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, source: str):  # type: ignore[no-untyped-def]
    """Put it in place of the package; returns a function that reads what it was called with."""
    (tmp_path / file).write_text(f"PLACE = {str(tmp_path / 'calls')!r}\n{source}")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("wandb", "mlflow", "mlflow.tracking"):
        monkeypatch.setitem(sys.modules, name, sys)  # so that what is imported now is gone afterwards
        monkeypatch.delitem(sys.modules, name)
    return lambda: [json.loads(line) for line in (tmp_path / "calls").read_text().splitlines()]
