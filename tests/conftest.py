"""One local Ray cluster for the whole session; tests that need it ask for the `cluster` fixture."""

import os

os.environ["RAY_AUTH_MODE"] = "disabled"
os.environ["RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"] = "0.2"
os.environ["HF_HUB_OFFLINE"] = "1"

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes import Start, starting
from tests.ray.pipeline import pipeline, tiny_config
from tests.tiny import tiny_target


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    import ray

    ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=True)
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama with 8 layers, hidden 32, and a byte-level tokenizer."""
    return tiny_target(tmp_path_factory.mktemp("target") / "tiny")


@pytest.fixture(scope="session")
def generated(tmp_path_factory: pytest.TempPathFactory, target_folder: Path, cluster: None) -> Path:
    """A folder whose run has finished `generate`."""
    folder = tmp_path_factory.mktemp("generated")
    pipeline(tiny_config(folder, target_folder)).stage("generate")
    return folder


@pytest.fixture
def start() -> Iterator[Start]:
    """Start programs that are marked as ours or not, orphaned or not; all are killed at the end."""
    with starting() as begin:
        yield begin
