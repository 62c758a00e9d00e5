"""A dataset from other projects' files is the one that extraction would have captured, and training starts from it."""

from pathlib import Path
from typing import Any

import pytest
import torch

from ray_eagle.conversations.conversation import read_conversations
from ray_eagle.errors import ConfigError, DatasetError, InputError
from ray_eagle.hidden_states.dataset import read_plan, read_records
from ray_eagle.hidden_states.reader import HiddenStates
from ray_eagle.run import RunFolder
from tests.loose import WRITERS, State, write_masks
from tests.ray.pipeline import Watch, pipeline, start_after_generate, tiny_config
from tests.states import plain_model

AUX = (1, 3, 4)


def captured(target: Path, generated: Path, norm: str) -> list[State]:
    """What another project would have captured: plain transformers, one sample after the other."""
    model = plain_model(target, torch.float32)
    before: list[torch.Tensor] = []
    model.model.norm.register_forward_pre_hook(lambda _, given: before.append(given[0][0].clone()))
    states = []
    for c in read_conversations(RunFolder.open(str(generated / "run")).of("generate")):
        with torch.inference_mode():
            hidden = model(torch.tensor([c.input_ids]), output_hidden_states=True).hidden_states
        aux = torch.cat([hidden[layer + 1][0] for layer in AUX], dim=-1)
        last = hidden[-1][0] if norm == "after" else before[-1]
        states.append((c.input_ids, c.loss_mask, aux.clone(), last.clone()))
    return states


def rows(folder: Path) -> dict[str, Any]:
    states = RunFolder.open(str(folder / "run")).of("extract")
    found = {}
    for split in ("train", "validation", "held_out"):
        reader = HiddenStates(states, split)  # type: ignore[arg-type]
        found |= {reader[i].sample_id: reader[i] for i in range(len(reader))}
    return found


@pytest.fixture(scope="module")
def extracted(generated: Path, target_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = start_after_generate(generated, tmp_path_factory.mktemp("extracted"))
    pipeline(tiny_config(folder, target_folder)).stage("extract")
    return folder


@pytest.mark.parametrize(("project", "norm"), [("SpecForge", "after"), ("speculators", "before"), ("AngelSlim", "before")])  # fmt: skip
def test_an_imported_dataset_is_the_captured_one(
    project: str, norm: str, extracted: Path, generated: Path, target_folder: Path, tmp_path: Path
) -> None:
    states = captured(target_folder, generated, norm)
    for number, state in enumerate(states):
        WRITERS[project](tmp_path / "files", number, state)
    given = {"path": str(tmp_path / "files"), "layers": [k + 1 for k in AUX], "convention": "input"}
    if project == "speculators":
        given["masks"] = str(write_masks(tmp_path / "masks", states))
    (tmp_path / "files" / "broken_9999.pt").write_bytes(b"no file")
    watch = Watch()
    config = tiny_config(tmp_path / "run", target_folder, states=given)
    pipe = pipeline(config, watch)
    for stage in ("generate", "extract", "vocab"):
        pipe.stage(stage)
    [rejected] = pipe.run.of("generate").read_jsonl("rejected.jsonl")
    assert rejected["source_id"] == "broken_9999.pt" and "intact file" in rejected["reason"]
    assert any(f"taken {norm} the final norm" in line for line in watch.said), watch.said
    found, expected = rows(tmp_path / "run"), rows(extracted)
    assert found.keys() == expected.keys() and len(found) == len(states)
    for name, row in found.items():
        wanted = expected[name]
        assert torch.equal(row.input_ids, wanted.input_ids) and torch.equal(row.loss_mask, wanted.loss_mask)
        torch.testing.assert_close(row.aux, wanted.aux, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(row.last, wanted.last, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(row.lse, wanted.lse, atol=1e-4, rtol=1e-4)
        assert (row.top1 == wanted.top1).float().mean() > 0.9
    assert pipe.stage("extract") is None


def test_what_does_not_fit_is_said_before_anything_is_stored(
    generated: Path, target_folder: Path, tmp_path: Path
) -> None:
    states = captured(target_folder, generated, "before")[:6]
    files = [WRITERS["SpecForge"](tmp_path / "files", number, state) for number, state in enumerate(states)]
    given = {"path": str(tmp_path / "files"), "layers": AUX}

    def stages(**changed: Any) -> Any:
        config = tiny_config(tmp_path / "run", target_folder, states=given | changed)
        return pipeline(config)

    with pytest.raises(
        ConfigError, match=r"states\.layers.*outputs of \[1, 3, 4\], found outputs of \[0, 2, 3\].*target\.aux_layers"
    ):
        stages(convention="input").stage("generate")
    stages().stage("generate")
    with pytest.raises(InputError, match=r"last states taken after the final norm.*0% of"):
        wrong = stages(norm="after")
        wrong.stage("generate", redo=True)
        wrong.stage("extract")
    again = stages()
    again.stage("generate", redo=True)
    for number, (ids, mask, aux, last) in enumerate(states):
        other = [*ids[:1], *(token + 1 for token in ids[1:])]
        files[number].unlink()
        WRITERS["SpecForge"](tmp_path / "files", number, (other, mask, aux, last))
    with pytest.raises((InputError, DatasetError), match="tokens"):
        again.stage("extract", redo=True)


def test_states_that_are_not_finite_are_set_aside_and_no_target_is_blamed(
    generated: Path, target_folder: Path, tmp_path: Path
) -> None:
    nan = float("nan")
    states = captured(target_folder, generated, "after")[:6]
    for number, (ids, mask, aux, last) in enumerate(states):
        WRITERS["SpecForge"](
            tmp_path / "files",
            number,
            (ids, mask, aux * (nan if number == 1 else 1), last * (nan if number == 2 else 1)),
        )
    config = tiny_config(tmp_path / "run", target_folder, states={"path": str(tmp_path / "files"), "layers": AUX})
    pipe = pipeline(config.model_copy(update={"allow_quarantine": True}))
    pipe.stage("generate")
    outcome = pipe.stage("extract")
    assert outcome and outcome.samples == 4
    folder = pipe.run.of("extract")
    aside = [q for record in read_records(folder, read_plan(folder)).values() for q in record.quarantined]
    assert sorted(q.source_id for q in aside) == ["rows_0-5/data_1.ckpt", "rows_0-5/data_2.ckpt"]
    for sample in aside:
        assert sample.reason.startswith("the file's hidden states are NaN or infinite, read as float32: ")
