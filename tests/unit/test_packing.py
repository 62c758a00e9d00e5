"""Packs read for a training run: the same whether a thread makes them aside or not."""

import dataclasses
import random
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from ray_eagle.errors import DatasetError
from ray_eagle.hidden_states.reader import HiddenStates
from ray_eagle.training.packing import Pack, make_pack, read_packs
from tests.random_data import random_dataset


def equal(one: Any, other: Any) -> bool:
    """Of packs, and all that they hold."""
    if dataclasses.is_dataclass(one):
        return all(equal(getattr(one, f.name), getattr(other, f.name)) for f in dataclasses.fields(one))
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


def threads() -> int:
    return sum(thread.name.startswith("eagle-") for thread in threading.enumerate())


@pytest.mark.parametrize("aside", [False, True])
@pytest.mark.parametrize("everywhere", [False, True])
def test_packs_are_those_of_their_samples_in_order(tmp_path: Path, aside: bool, everywhere: bool) -> None:
    states = HiddenStates(random_dataset(tmp_path, samples=40)[0], "train")
    samples, rng = list(states), random.Random(aside)
    groups = [rng.choices(range(len(states)), k=rng.randint(1, 7)) for _ in range(25)]
    read = read_packs(states, groups, 3, everywhere=everywhere, aside=aside)
    for group, pack in zip(groups, read, strict=True):
        assert equal(pack, make_pack([samples[i] for i in group], 3, everywhere=everywhere))
    assert not threads()


@pytest.mark.parametrize("aside", [False, True])
def test_a_reading_that_is_left_ends(tmp_path: Path, aside: bool) -> None:
    states = HiddenStates(random_dataset(tmp_path, samples=40)[0], "train")
    read = read_packs(states, [[i] for i in range(len(states))], 2, aside=aside)
    assert isinstance(next(read), Pack) and threads()
    read.close()
    assert not threads()


@pytest.mark.parametrize("aside", [False, True])
def test_a_shard_that_is_cut_off_is_said_where_its_pack_would_come(tmp_path: Path, aside: bool) -> None:
    folder = random_dataset(tmp_path, samples=40)[0]
    states = HiddenStates(folder, "train")
    last = states.rows[-1]
    damaged = Path(folder.file(last.file))
    kept = [i for i, row in enumerate(states.rows) if row.file != last.file]
    damaged.write_bytes(damaged.read_bytes()[: last.record.start + 10])
    read = read_packs(states, [kept[:2], kept[2:4], [len(states) - 1]], 2, aside=aside)
    assert len(next(read).names) == len(next(read).names) == 2
    with pytest.raises(DatasetError, match="cannot be read"):
        next(read)
