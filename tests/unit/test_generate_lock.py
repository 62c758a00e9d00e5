"""One driver at a time generates into a run: a second one is refused, and what the first one makes is as if alone."""

import os
import socket
from pathlib import Path

import pytest
import torch

from ray_eagle import lock
from ray_eagle.config import Config
from ray_eagle.conversations import states
from ray_eagle.conversations.generate import generate
from ray_eagle.errors import LockedError
from ray_eagle.lock import Lock
from ray_eagle.run import Origin
from ray_eagle.stages import Pipeline
from tests.loose import specforge
from tests.random_data import random_tokens
from tests.ray.pipeline import Watch, pipeline, tiny_config
from tests.tiny import SHAPE

REFUSED = rf"conversations is being written by process {os.getpid()} on {socket.gethostname()}"


@pytest.fixture
def settings(tmp_path: Path, target_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """Of a `generate` that needs no cluster: twelve files of states, of which five are a part."""
    generator, width = torch.Generator().manual_seed(1), SHAPE["hidden_size"]
    for number in range(12):
        ids, mask = random_tokens(generator, 50)
        states_TC = torch.randn(len(ids), 4 * width, generator=generator)
        specforge(tmp_path / "files", number, (ids, mask, states_TC[:, width:], states_TC[:, :width]))
    monkeypatch.setattr(states, "PART", 5)
    return tiny_config(tmp_path, target_folder, states={"path": str(tmp_path / "files"), "layers": (1, 3, 4)})


def written(run: Pipeline) -> dict[str, bytes]:
    folder = run.run.of("generate")
    return {name: folder.read_bytes(name) for name in folder.names()}


def test_a_second_driver_is_refused_and_the_first_one_ends_as_if_alone(settings: Config, tmp_path: Path) -> None:
    alone = pipeline(settings.model_copy(update={"run": str(tmp_path / "alone")}))
    generate(alone.config, alone.run, alone.facts, Watch())
    refused = 0

    def second_driver(task: str, amount: float) -> None:
        nonlocal refused
        before = written(run)
        with pytest.raises(LockedError, match=REFUSED):
            generate(settings, run.run, run.facts, Watch())
        assert written(run) == before
        refused += 1

    run = pipeline(settings)
    generate(settings, run.run, run.facts, Watch(second_driver))
    assert refused == 3
    assert written(run) == written(alone)
    assert lock.LOCK not in written(run) and "part-00002.jsonl" in written(run)


def test_what_another_driver_makes_is_not_redone_and_keeps_its_origin(settings: Config) -> None:
    run = pipeline(settings)
    generate(settings, run.run, run.facts, Watch())
    run.run.write_origin(Origin(stage="generate", settings={"seed": 7}, inputs={}, target={}))
    with Lock(run.run.of("generate")):
        made = written(run)
        for redo in (False, True):
            with pytest.raises(LockedError, match=REFUSED):
                run.stage("generate", redo=redo)
        assert written(run) == made


def test_a_driver_that_died_before_its_first_part_binds_nobody(settings: Config) -> None:
    run = pipeline(settings)
    folder = run.run.of("generate")
    run.run.write_origin(Origin(stage="generate", settings={"seed": 7}, inputs={}, target={}))
    folder.write_json(lock.LOCK, {**lock._here(), "pid": os.getpid(), "started": "1"})
    assert run._nothing_made("generate")
    generate(settings, run.run, run.facts, Watch())
    assert not folder.exists(lock.LOCK) and not run._nothing_made("generate")
