"""What a drafter's start costs in memory and reads, against all states at once."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ray_eagle.config import Config
from ray_eagle.drafter import start
from ray_eagle.drafter.checkpoint import save_drafter
from ray_eagle.errors import DatasetError
from ray_eagle.hidden_states.reader import HiddenStates
from ray_eagle.hidden_states.schema import STATE_DTYPES
from ray_eagle.progress import Silent
from ray_eagle.run import Folder, RunFolder
from ray_eagle.target.loading import read_facts
from ray_eagle.training.loop import Trainer, TrainJob
from ray_eagle.vocab import vocab
from tests.random_data import random_dataset
from tests.tiny import VOCAB, tiny_drafter, tiny_shape
from tests.unit.test_vocab import HIDDEN, Row, random_rows, write_dataset


class Floats(TorchDispatchMode):
    """Notes how many numbers the largest tensor of 32 or 64 bits has."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, Tensor) and made.dtype in (torch.float32, torch.float64):
            self.largest = max(self.largest, made.numel())
        return made


@pytest.mark.parametrize("state_dtype", list(STATE_DTYPES))
def test_channels_are_measured_a_few_tokens_at_a_time(
    tmp_path: Path, state_dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start, "ROWS", 7, raising=False)
    folder, _, _ = random_dataset(tmp_path, samples=60, state_dtype=state_dtype)
    states = HiddenStates(folder, "train")
    with Floats() as floats:
        rms_C = start.channel_rms(states, most=12)
    slow_C = torch.cat([states[i].aux_states(torch.float32)[1:] for i in range(12)]).square().mean(0).sqrt()
    torch.testing.assert_close(rms_C, slow_C, rtol=1e-6, atol=0)
    view = max(states.lengths()[:12]) if state_dtype == "float32" else 0  # of the file, and no memory
    assert floats.largest <= max(7, view) * 24


def test_channels_of_samples_of_one_token_have_size_one(tmp_path: Path) -> None:
    folder = Folder.at(tmp_path)
    write_dataset(folder, [Row("train", [i], [m], []) for i in range(VOCAB) for m in (0, 1)])
    assert torch.equal(start.channel_rms(HiddenStates(folder, "train")), torch.ones(3 * HIDDEN))


def test_a_trainer_of_a_given_drafter_reads_no_states_to_start(tmp_path: Path, target_folder: Path) -> None:
    save_drafter(tiny_drafter(tiny_shape()), tmp_path / "given")
    run = RunFolder.open(str(tmp_path / "run"))
    write_dataset(run.of("extract"), random_rows(1, list(range(40, 90))))
    target = {"path": str(target_folder), "dtype": "float32"}
    config = Config.model_validate({"target": target, "drafter": {"path": str(tmp_path / "given")}})
    facts = read_facts(config.target)
    vocab(config, run, facts, Silent())
    for name in run.of("extract").names():
        if name.endswith(".arrow"):
            run.of("extract").delete_file(name)
    assert Trainer(TrainJob(config, run, facts)).total_steps
    with pytest.raises(DatasetError, match="cannot be read"):
        Trainer(TrainJob(Config.model_validate({"target": target}), run, facts))
