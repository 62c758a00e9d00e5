"""Which checkpoints exist, which is gone on from and which are kept, on any filesystem."""

import itertools
import math
import random
from pathlib import Path

import pyarrow.fs as pafs
import pytest
import torch

from ray_eagle.errors import InputError
from ray_eagle.run import Folder
from ray_eagle.training.checkpoints import SCORE, STATE, Checkpoints, Record, describe


@pytest.fixture(params=["local", "object store"])
def checkpoints(request: pytest.FixtureRequest, tmp_path: Path) -> Checkpoints:
    """Of an empty folder; the second kind has no files of the operating system."""
    if request.param == "local":
        return Checkpoints(Folder.at(tmp_path / "checkpoints"))
    folder = Folder(pafs._MockFileSystem(), "bucket/run/checkpoints")
    folder.create()
    return Checkpoints(folder)


def made(
    checkpoints: Checkpoints, tmp_path: Path, step: int, score: float, *, keep: int, copied: float = 1.0
) -> Record:
    """Save, copy (a share of the bytes) and commit a checkpoint, as a worker does."""
    torch.save({"step": step, "weights": torch.full((300,), float(step))}, tmp_path / STATE)
    record = describe(tmp_path / STATE, "attempt-0001", step, {SCORE: score, "step": float(step)})
    data = (tmp_path / STATE).read_bytes()
    put(checkpoints, record, data[: round(copied * len(data))])
    checkpoints.commit(record, keep)
    return record


def put(checkpoints: Checkpoints, record: Record, data: bytes) -> None:
    fs, folder = checkpoints.folder.fs, checkpoints.folder.file(record.folder)
    fs.create_dir(folder, recursive=True)
    with fs.open_output_stream(f"{folder}/{STATE}") as stream:
        stream.write(data)


def states(checkpoints: Checkpoints) -> int:
    """Copies of a state, recorded or not."""
    found = checkpoints.folder.fs.get_file_info(pafs.FileSelector(checkpoints.folder.path, recursive=True))
    return sum(info.base_name == STATE for info in found)


def slow_keep(scores: list[float], keep: int) -> set[int]:
    """Steps that are left after each checkpoint in turn: the newest few, and the best of those still there."""
    left: list[int] = []
    for step in range(len(scores)):
        left.append(step)
        best = left[0]
        for other in left:
            if not math.isnan(scores[other]) and (math.isnan(scores[best]) or scores[other] >= scores[best]):
                best = other
            if math.isnan(scores[other]) and math.isnan(scores[best]):
                best = other
        left = [s for s in left if s in left[-keep:] or s == best]
    return set(left)


@pytest.mark.parametrize("seed", range(12))
def test_the_best_and_the_newest_are_kept(checkpoints: Checkpoints, tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    keep = rng.randint(1, 3)
    scores = [rng.choice([math.nan, 1.0, 2.0, 2.0, rng.random() * 3]) for _ in range(rng.randint(1, 9))]
    for step, score in enumerate(scores):
        made(checkpoints, tmp_path, step, score, keep=keep)
    records = checkpoints.records()
    assert {r.step for r in records} == slow_keep(scores, keep)
    assert [r.step for r in records] == sorted(r.step for r in records)
    assert states(checkpoints) == len(records)
    best, newest = checkpoints.best(pytest.fail), checkpoints.newest(pytest.fail)
    assert best and newest and newest.step == len(scores) - 1
    known = [score for score in scores if not math.isnan(score)]
    assert best.figures[SCORE] == max(known) if known else math.isnan(best.figures[SCORE])
    state = checkpoints.load(best, "cpu")
    assert state["step"] == best.step and torch.equal(state["weights"], torch.full((300,), float(best.step)))


def test_a_copy_that_was_cut_does_not_exist_and_is_cleared_away(checkpoints: Checkpoints, tmp_path: Path) -> None:
    assert checkpoints.newest(pytest.fail) is None and checkpoints.best(pytest.fail) is None
    assert checkpoints.new_attempt() == "attempt-0001"
    whole = made(checkpoints, tmp_path, 1, 1.5, keep=2)
    for share in (0.0, 0.5, 0.999):
        made(checkpoints, tmp_path, 2, 2.5, keep=2, copied=share)
    assert checkpoints.records() == [whole] and states(checkpoints) == 4
    assert checkpoints.newest(pytest.fail) == whole
    assert checkpoints.new_attempt() == "attempt-0002"
    assert states(checkpoints) == 1 and checkpoints.newest(pytest.fail) == whole


def test_an_attempt_that_left_no_checkpoint_is_cleared_away(checkpoints: Checkpoints, tmp_path: Path) -> None:
    made(checkpoints, tmp_path, 1, 1.5, keep=2, copied=0.5)
    assert checkpoints.new_attempt() == "attempt-0002"
    assert states(checkpoints) == 0 and checkpoints.newest(pytest.fail) is None


@pytest.mark.parametrize("damage", ["cut", "changed", "gone"])
def test_damaged_ones_are_passed_over_and_named(checkpoints: Checkpoints, tmp_path: Path, damage: str) -> None:
    records = [made(checkpoints, tmp_path, step, float(step), keep=3) for step in (1, 2, 3)]

    def harm(record: Record) -> str:
        path = checkpoints.folder.file(f"{record.folder}/{STATE}")
        data = bytearray(checkpoints.folder.read_bytes(f"{record.folder}/{STATE}"))
        if damage == "gone":
            checkpoints.folder.fs.delete_file(path)
            return f"{path}: missing"
        if damage == "cut":
            put(checkpoints, record, bytes(data[:100]))
            return f"{path}: expected {record.bytes:,} bytes, found 100"
        data[len(data) // 2] ^= 4
        put(checkpoints, record, bytes(data))
        return f"{path}: expected checksum {record.checksum}, found "

    for record, previous in itertools.pairwise(reversed(records)):
        fault = harm(record)
        for choose in (checkpoints.newest, checkpoints.best):
            said: list[str] = []
            assert choose(said.append) == previous
            assert any(f"step {record.step} is damaged" in line and fault in line for line in said)
    harm(records[0])
    for choose in (checkpoints.newest, checkpoints.best):
        with pytest.raises(InputError, match=r"no checkpoint is whole: .*ray-eagle train --redo"):
            choose(lambda line: None)
