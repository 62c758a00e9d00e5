"""Files of hidden states of other projects: what they hold, without padding, or what is wrong with them."""

import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ray_eagle.errors import InputError
from ray_eagle.hidden_states.loose import Masks, find_files, read_sample, spans
from tests.loose import WRITERS, State, write_masks
from tests.random_data import random_tokens

HIDDEN = 6


def random_state(seed: int, dtype: torch.dtype = torch.bfloat16) -> State:
    generator = torch.Generator().manual_seed(seed)
    ids, mask = random_tokens(generator, 50)
    width = torch.randn(len(ids), 4 * HIDDEN, generator=generator).to(dtype)
    return ids, mask, width[:, : 3 * HIDDEN].clone(), width[:, 3 * HIDDEN :].clone()


@pytest.mark.parametrize("project", WRITERS)
def test_every_project_s_files_are_read(project: str, tmp_path: Path) -> None:
    states = [random_state(seed, (torch.bfloat16, torch.float16, torch.float32)[seed % 3]) for seed in range(12)]
    files = [WRITERS[project](tmp_path, number, state) for number, state in enumerate(states)]
    names = [str(file.relative_to(tmp_path)) for file in files]
    assert sorted(find_files(tmp_path)) == sorted(names)
    assert project == "AngelSlim" or find_files(tmp_path) == names  # in the order of their numbers
    masks = Masks(write_masks(tmp_path / "masks", states))
    for name, (ids, mask, aux, last) in zip(names, states, strict=True):
        found = read_sample(tmp_path, name, HIDDEN)
        length = len(ids)
        assert found.project == project.partition(",")[0]
        assert found.ids_T[:length].tolist() == ids
        assert torch.equal(found.aux_TC[:length], aux) and torch.equal(found.last_TH[:length], last)
        if found.mask_T is None:
            assert masks.of(name, found.ids_T.tolist()) == mask
        else:
            assert found.mask_T.int().tolist() == mask + [0] * (len(found.ids_T) - length)
        assert len(found.ids_T) == length + (3 if project == "ModelOpt" else 0)


def test_spans_are_runs_of_ones() -> None:
    for seed in range(50):
        mask = torch.randint(0, 2, (seed % 9,), generator=torch.Generator().manual_seed(seed)).tolist()
        again = [0] * len(mask)
        for start, end in spans(mask):
            assert start < end and (start == 0 or not mask[start - 1])
            again[start:end] = [1] * (end - start)
        assert again == mask


def save(path: Path, **tensors: Any) -> None:
    torch.save(tensors, path)


def sample(**changed: Any) -> dict[str, Any]:
    ids, mask, aux, last = random_state(1)
    return {
        "input_ids": torch.tensor(ids), "loss_mask": torch.tensor(mask), "aux_hidden_state": aux, "hidden_state": last,
    } | changed  # fmt: skip


class Harmful:
    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("/tmp/harmed"),))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (sample(hidden_state=torch.zeros(3, HIDDEN)), r"hidden_state \[\d+, 6\].*found \[\d+, 18\] and \[3, 6\]"),
        (sample(aux_hidden_state=torch.zeros(2, 5, HIDDEN)), r"one sample a file.*found \[2, 5, 6\]"),
        (sample(loss_mask=torch.ones(1)), r"loss_mask \[1\]"),
        ({"input_ids": torch.ones(3), "states": torch.ones(3)}, r"aux_hidden_state.*SpecForge.*found input_ids, states"),
        ([1, 2], "expected a dictionary of tensors, found list"),
        ({"input_ids": Harmful()}, "expected an intact file of tensors"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_sample_is_named(content: Any, message: str, tmp_path: Path) -> None:
    file = tmp_path / "data_7.ckpt"
    torch.save(content, file)
    with pytest.raises(InputError, match=rf"(?s){file}.*{message}.*docs/import.md"):
        read_sample(tmp_path, file.name, HIDDEN)
    assert not Path("/tmp/harmed").exists()


def test_damaged_files_are_named(tmp_path: Path) -> None:
    file = tmp_path / "data_7.ckpt"
    torch.save(sample(), file)
    whole = file.read_bytes()
    for damage, found in (
        (whole[: len(whole) // 2], "a file that was cut short"),
        (whole[:-1], "a file that was cut short"),
        (b"PK\3\4nothing", "a file that was cut short"),
        (b"", "an empty file"),
        (pickle.dumps({"input_ids": [1]}), "no zip file of torch.save, but another kind, such as a plain pickle"),
    ):
        file.write_bytes(damage)
        with pytest.raises(InputError, match=rf"{file}: expected an intact file of tensors, found {found}"):
            read_sample(tmp_path, file.name, HIDDEN)
    for name in ("data_7.ckpt.gz", "hs_0.safetensors"):
        (tmp_path / name).touch()
        with pytest.raises(InputError, match=rf"{name}: expected an intact file of tensors, found an empty file"):
            read_sample(tmp_path, name, HIDDEN)
    with zipfile.ZipFile(file, "w") as empty:
        empty.writestr("x", "y")
    with pytest.raises(InputError, match="expected an intact file"):
        read_sample(tmp_path, file.name, HIDDEN)
    save_file({"token_ids": torch.ones(2)}, tmp_path / "hs_1.safetensors")
    with pytest.raises(InputError, match=r"expected the tensors.*found token_ids"):
        read_sample(tmp_path, "hs_1.safetensors", HIDDEN)
    with pytest.raises(InputError, match=r"expected an intact file of tensors"):
        read_sample(tmp_path, "missing.pt", HIDDEN)


def test_masks_that_do_not_belong_are_refused(tmp_path: Path) -> None:
    states = [random_state(seed) for seed in range(4)]
    masks = Masks(write_masks(tmp_path / "masks", states))
    with pytest.raises(InputError, match=r"hs_4.*4 rows.*number 4"):
        masks.of("hs_4.safetensors", [1])
    with pytest.raises(InputError, match="tokens of row 2"):
        masks.of("hs_2.safetensors", [77, *states[2][0][1:]])
    with pytest.raises(InputError, match=r"states\.masks.*no \*\.arrow file"):
        Masks(tmp_path / "nothing")
    with pytest.raises(InputError, match=r"states\.path.*found no folder"):
        find_files(tmp_path / "nothing")
