"""Where the curves go: event files that a resumed run goes on in, and packages that may be missing."""

import json
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from ray_eagle.config import TrainConfig
from ray_eagle.errors import ConfigError
from ray_eagle.run import Folder
from ray_eagle.training.trackers import Mlflow, TensorBoard, Wandb, check_trackers

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
