"""Runs that tests start from: one that is ready for training, one that trained undisturbed."""

import signal
from pathlib import Path

import pytest

from tests.ray.pipeline import pipeline, tiny_config
from tests.ray.training import DETERMINISTIC, fresh


@pytest.fixture(scope="session")
def captured(tmp_path_factory: pytest.TempPathFactory, target_folder: Path, cluster: None) -> Path:
    """A folder whose run has finished `vocab`."""
    folder = tmp_path_factory.mktemp("captured")
    run = pipeline(tiny_config(folder, target_folder))
    for stage in ("generate", "extract", "vocab"):
        run.stage(stage)
    return folder


@pytest.fixture(scope="session")
def uninterrupted(captured: Path, tmp_path_factory: pytest.TempPathFactory, target_folder: Path) -> Path:
    """That run, trained by one worker with deterministic kernels."""
    folder = fresh(captured, tmp_path_factory.mktemp("whole") / "x")
    handler = signal.getsignal(signal.SIGINT)
    pipeline(tiny_config(folder, target_folder, train=DETERMINISTIC)).stage("train")
    assert signal.getsignal(signal.SIGINT) is handler, "Ctrl-C works in the stages after training as before"
    return folder
