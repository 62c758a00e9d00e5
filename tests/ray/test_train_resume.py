"""Training that dies: killed workers and drivers, other numbers of workers, damaged checkpoints, ranks without positions."""

import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from ray_eagle.config import Config
from ray_eagle.errors import InputError, LockedError
from ray_eagle.progress import Silent
from ray_eagle.run import CHECKPOINTS, RunFolder
from ray_eagle.target.loading import read_facts
from ray_eagle.training.checkpoints import STATE, Checkpoints, describe
from ray_eagle.training.loop import Trainer
from ray_eagle.training.train import train
from ray_eagle.vocab import vocab
from tests.ray.pipeline import Watch, pipeline, ray_processes, tiny_config
from tests.ray.training import DETERMINISTIC, assert_close, curve, fresh, same, train_here
from tests.unit.test_vocab import Row, random_rows, write_dataset

pytestmark = pytest.mark.usefixtures("cluster")

DRIVER = """
import sys
from ray_eagle.config import Config
from tests.ray.pipeline import pipeline
try:
    pipeline(Config.model_validate_json(sys.stdin.read())).stage("train")
except KeyboardInterrupt:
    sys.exit(130)
"""


@contextmanager
def driver(config: Config) -> Iterator[subprocess.Popen[bytes]]:
    """Another process that drives the same training on this session's cluster; dead at the end."""
    address = ray.get_runtime_context().gcs_address
    config = config.model_copy(update={"ray": config.ray.model_copy(update={"address": address})})
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen([sys.executable, "-c", DRIVER], stdin=subprocess.PIPE, env=environment)
    assert process.stdin
    process.stdin.write(config.model_dump_json().encode())
    process.stdin.close()
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def step(folder: Path) -> float:
    rows = curve(folder)
    return rows[-1]["step"] if rows else 0


def wait_for(folder: Path, wanted: float, process: subprocess.Popen[bytes]) -> None:
    while step(folder) < wanted:
        assert process.poll() is None, "the driver ended by itself"
        time.sleep(0.02)


def kill_worker(folder: Path, wanted: float, killed: list[int]) -> None:
    """Kill a worker of this session's cluster as soon as it logged step `wanted`."""
    while step(folder) < wanted or not (alive := ray_processes("RayTrainWorker")):
        time.sleep(0.02)
    os.kill(alive[0], signal.SIGKILL)
    killed.append(alive[0])


def test_three_random_kills_leave_no_trace(
    captured: Path, uninterrupted: Path, tmp_path: Path, target_folder: Path
) -> None:
    """A worker, the driver, then a worker of the next driver, each at a random step. No second driver gets in meanwhile."""
    folder = fresh(captured, tmp_path / "x")
    last = int(curve(uninterrupted)[-1]["step"])
    rng = random.Random(time.time_ns())
    first, second, third = sorted(rng.sample(range(2, last - 3), 3))
    print(f"killed at steps {first}, {second}, {third} of {last}")  # shown when the test fails
    config = tiny_config(folder, target_folder, train=DETERMINISTIC)
    killed: list[int] = []
    with driver(config) as process:
        kill_worker(folder, first, killed)
        with pytest.raises(LockedError, match=f"process {process.pid} on"):
            pipeline(config).stage("train")
        wait_for(folder, max(second, step(folder) + 1), process)
        process.send_signal(signal.SIGKILL)
    reached = step(folder)
    thread = threading.Thread(target=kill_worker, args=(folder, max(third, reached), killed))
    thread.start()
    pipeline(config).stage("train")
    thread.join()
    assert len(killed) == 2 and process.returncode == -signal.SIGKILL
    assert same(folder, uninterrupted)


def test_another_number_of_workers_goes_on_with_the_same_plan(
    captured: Path, tmp_path: Path, target_folder: Path
) -> None:
    """Two workers until Ctrl-C, then one; then as many as fit of eight, from its last checkpoint but one."""
    settings: dict[str, Any] = {"packs_per_step": 2, "checkpoint_every": 2, "noise": 0.2, "epochs": 4}
    whole, folder = fresh(captured, tmp_path / "whole"), fresh(captured, tmp_path / "x")
    train_here(tiny_config(whole, target_folder, train=settings))
    with driver(tiny_config(folder, target_folder, train={**settings, "workers": 2})) as process:
        wait_for(folder, 3, process)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
    assert 0 < step(folder) < step(whole)
    watch = Watch()
    pipeline(tiny_config(folder, target_folder, train=settings), watch).stage("train")
    assert any(line.startswith("train: going on from the checkpoint of step ") for line in watch.said)
    assert_close(curve(folder), curve(whole))

    elastic = fresh(captured, tmp_path / "elastic")
    shutil.copytree(folder / "run" / CHECKPOINTS, elastic / "run" / CHECKPOINTS)
    kept = Checkpoints(RunFolder.open(str(elastic / "run")).folder(CHECKPOINTS))
    kept.folder.delete_file(kept.records()[-1].name)
    pipeline(tiny_config(elastic, target_folder, train={**settings, "workers": 8, "min_workers": 1})).stage("train")
    assert_close(curve(elastic), curve(whole))


def checkpointed(folder: Path, config: Config, steps: int) -> Checkpoints:
    """Train so far in this process, and leave the checkpoints that a worker would have left."""
    checkpoints = Checkpoints(RunFolder.open(config.run).folder(CHECKPOINTS))

    def leave(trainer: Trainer, figures: dict[str, float]) -> None:
        trainer.save(folder / STATE)
        record = describe(folder / STATE, "attempt-0001", trainer.step, figures)
        place = Path(checkpoints.folder.file(record.folder))
        place.mkdir(parents=True)
        (folder / STATE).rename(place / STATE)
        checkpoints.commit(record, config.train.keep_checkpoints)

    train_here(config, steps, leave)
    return checkpoints


def test_a_damaged_checkpoint_is_passed_over_and_said(
    captured: Path, uninterrupted: Path, tmp_path: Path, target_folder: Path
) -> None:
    folder = fresh(captured, tmp_path / "x")
    config = tiny_config(folder, target_folder, train=DETERMINISTIC)
    checkpoints = checkpointed(tmp_path, config, 6)
    before, newest = checkpoints.records()[-2:]
    state = Path(checkpoints.folder.file(newest.folder)) / STATE
    os.truncate(state, newest.bytes // 2)
    cut = Path(checkpoints.folder.file("attempt-0001/step-00000008-cut"))
    cut.mkdir()
    (cut / STATE).write_bytes(b"a copy that was cut in the middle")
    watch = Watch()
    pipeline(config, watch).stage("train")
    [said] = [line for line in watch.said if " is damaged, " in line]
    assert f"checkpoint of step {newest.step} is damaged" in said and str(state) in said
    assert f"expected {newest.bytes:,} bytes, found {newest.bytes // 2:,}" in said
    assert f"train: going on from the checkpoint of step {before.step}" in watch.said
    assert not cut.exists()
    assert same(folder, uninterrupted)


def test_with_no_whole_checkpoint_training_does_not_begin_again(
    captured: Path, tmp_path: Path, target_folder: Path
) -> None:
    folder = fresh(captured, tmp_path / "x")
    config = tiny_config(folder, target_folder, train=DETERMINISTIC)
    checkpoints = checkpointed(tmp_path, config, 6)
    for record in checkpoints.records():
        path = Path(checkpoints.folder.file(record.folder)) / STATE
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    with pytest.raises(InputError, match=r"no checkpoint is whole: .*expected checksum.*ray-eagle train --redo"):
        pipeline(config).stage("train")
    assert not (folder / "run" / "drafter" / "model.safetensors").exists()


def test_a_rank_without_positions_neither_hangs_nor_biases(tmp_path: Path, target_folder: Path) -> None:
    """A sample is a pack here, and two of three teach one token alone, so that no position of theirs ever counts."""
    rows = random_rows(1, list(range(40, 90)), 36)
    for i, row in enumerate(rows):
        if i % 3 and row.split == "train":
            rows[i] = Row(row.split, row.ids, [0] * (len(row.ids) - 1) + [1], row.top1[:1])
    rows += [
        Row(s, [50 + i, 60, 61, 62, 63], [0, 1, 1, 1, 1], [60, 61, 62, 63])
        for i in range(6)
        for s in ("train", "validation")
    ]
    curves = []
    for workers in (1, 2):
        settings = {"workers": workers, "packs_per_step": 2, "tokens_per_pack": 1, "epochs": 1, "noise": 0.0}
        config = tiny_config(tmp_path / str(workers), target_folder, train=settings)
        run = RunFolder.open(config.run)
        torch.manual_seed(0)
        write_dataset(run.of("extract"), rows)
        facts = read_facts(config.target)
        vocab(config, run, facts, Silent())
        if workers == 1:
            train_here(config)
        else:
            train(config, run, facts, Silent())
        curves.append(curve(tmp_path / str(workers)))
    assert any(row.get("loss_0") == 0.0 for row in curves[0]), "a step that no rank has a position for"
    assert any(row.get("loss_0", 0.0) > 0.0 for row in curves[0])
    assert_close(*curves)
