"""Extraction where something is in the way: targets in several stages, bad samples, full disks, rows that exist already."""

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from safetensors.torch import load_file, save_file

from ray_eagle.conversations.conversation import read_conversations
from ray_eagle.errors import ConfigError, DatasetError, QuarantineError
from ray_eagle.hidden_states.dataset import read_plan, read_records
from ray_eagle.hidden_states.forecast import forecast
from ray_eagle.hidden_states.reader import HiddenStates
from ray_eagle.hidden_states.verify import verify
from ray_eagle.run import Folder, RunFolder
from tests.ray.pipeline import (
    Watch,
    committed,
    pipeline,
    ray_processes,
    start_after_generate,
    tiny_config,
    write_prompts,
)
from tests.tiny import tiny_deepseek_v3

pytestmark = pytest.mark.usefixtures("cluster")


def states_of(folder: Path) -> Folder:
    return RunFolder.open(str(folder / "run")).of("extract")


@pytest.fixture(scope="module")
def whole(generated: Path, tmp_path_factory: pytest.TempPathFactory, target_folder: Path) -> dict[int, bytes]:
    """What one actor with the whole target captures."""
    folder = start_after_generate(generated, tmp_path_factory.mktemp("whole"))
    pipeline(tiny_config(folder, target_folder)).stage("extract")
    return committed(folder)


@pytest.mark.parametrize(("stages", "actors", "split"), [(2, 2, (1, 7)), (4, 1, ())])
def test_any_number_of_stages_gives_the_same_bytes(
    generated: Path,
    whole: dict[int, bytes],
    tmp_path: Path,
    target_folder: Path,
    stages: int,
    actors: int,
    split: tuple[int, ...],
) -> None:
    folder = start_after_generate(generated, tmp_path)
    spread = {"stages": stages, "actors": actors, "split": split, "cpus": 0.5}
    pipeline(tiny_config(folder, target_folder, extract=spread)).stage("extract")
    assert len(whole) > 5
    assert committed(folder) == whole
    assert verify(states_of(folder)) == []


def test_a_mixture_of_experts_in_stages_gives_the_same_bytes(tmp_path: Path) -> None:
    """A DeepSeek-V3-style target, whose first layers are dense: the tokenizer is the tiny one, so the ids fit."""
    target = tiny_deepseek_v3(tmp_path / "deepseek")
    made = []
    for stages in (1, 2):
        folder = tmp_path / str(stages)
        config = tiny_config(folder, target, extract={"stages": stages, "cpus": 0.5, "state_dtype": "float8"})
        if stages == 1:
            pipeline(config).stage("generate")
        else:
            shutil.copytree(tmp_path / "1/run/conversations", folder / "run/conversations")
            shutil.copy(tmp_path / "1/prompts.jsonl", folder / "prompts.jsonl")
        pipeline(config).stage("extract")
        made.append(committed(folder))
    assert made[0] == made[1] and len(made[0]) > 2


def test_a_dead_stage_costs_only_uncommitted_units(
    generated: Path, whole: dict[int, bytes], tmp_path: Path, target_folder: Path
) -> None:
    folder = start_after_generate(generated, tmp_path)
    killed: list[int] = []
    before: list[dict[int, str]] = []

    def kill(task: str, amount: float) -> None:
        alive = ray_processes("StageWorker")
        if task == "extract" and len(killed) < 2 and alive:
            states = states_of(folder)
            before.append({u: r.file for u, r in read_records(states, read_plan(states)).items()})
            os.kill(alive[len(killed) % len(alive)], signal.SIGKILL)
            killed.append(alive[len(killed) % len(alive)])

    watch = Watch(kill)
    pipeline(tiny_config(folder, target_folder, extract={"stages": 2, "cpus": 0.5}), watch).stage("extract")
    assert len(killed) == 2 and any("actors died and were replaced" in said for said in watch.said)
    assert committed(folder) == whole
    states = states_of(folder)
    after = {u: r.file for u, r in read_records(states, read_plan(states)).items()}
    assert all(after.items() >= names.items() for names in before)
    assert not ray.util.placement_group_table() or all(
        group["state"] == "REMOVED" for group in ray.util.placement_group_table().values()
    )


def test_a_split_that_does_not_add_up_is_refused(generated: Path, tmp_path: Path, target_folder: Path) -> None:
    folder = start_after_generate(generated, tmp_path)
    config = tiny_config(folder, target_folder, extract={"stages": 2, "split": [3, 4]})
    with pytest.raises(ConfigError, match=r"expected 2 numbers .* add up to the target's 8 layers, found \[3, 4\]"):
        pipeline(config).stage("extract")


def spoil(target: Path, to: Path, token: int) -> Path:
    """A copy of the target whose embedding of one token is NaN."""
    shutil.copytree(target, to)
    weights = load_file(to / "model.safetensors")
    weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
    weights["model.embed_tokens.weight"][token] = float("nan")
    save_file(weights, to / "model.safetensors", metadata={"format": "pt"})
    return to


@pytest.mark.parametrize("stages", [1, 2])
def test_bad_samples_are_set_aside_counted_and_named(
    generated: Path, tmp_path: Path, target_folder: Path, stages: int
) -> None:
    """NaN states and samples beyond the context; the other samples of their packs come through."""
    rows = list(read_conversations(RunFolder.open(str(generated / "run")).of("generate")))
    used: dict[int, set[str]] = {}
    for row in rows:
        for token in row.input_ids:
            used.setdefault(token, set()).add(row.source_id)
    context = sorted({len(r.input_ids) for r in rows})[-2]
    longer = {r.source_id for r in rows if len(r.input_ids) > context}
    token = next(t for t, sources in sorted(used.items(), reverse=True) if 2 <= len(sources - longer) <= 6)
    target = spoil(target_folder, tmp_path / "spoiled", token)
    config_json = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config_json | {"max_position_embeddings": context}))
    broken = used[token] - longer
    assert longer and broken

    folder = start_after_generate(generated, tmp_path / "run")
    # the target changed, so conversations are claimed for the new one: what they hold is what a user's import would
    origin = RunFolder.open(str(folder / "run"))
    config = tiny_config(folder, target, extract={"stages": stages, "cpus": 0.5})
    adopt_conversations(origin, config)
    expected = len(rows) - len(longer) - len(broken)
    for _ in range(2):  # again on a second run: it is not forgotten
        with pytest.raises(QuarantineError, match=rf"{len(longer) + len(broken)} samples were set aside") as told:
            pipeline(config).stage("extract")
        assert "--allow-quarantine" in str(told.value) and "tokens, the target's context is" in str(told.value)
    watch = Watch()
    outcome = pipeline(config.model_copy(update={"allow_quarantine": True}), watch).stage("extract")
    assert outcome and outcome.samples == expected
    assert any("set aside" in said for said in watch.said)
    states = states_of(folder)
    plan = read_plan(states)
    assert {q.source_id for q in plan.quarantined} == longer
    aside = [q for record in read_records(states, plan).values() for q in record.quarantined]
    assert {q.source_id for q in aside} == broken and all("NaN or infinite" in q.reason for q in aside)
    assert verify(states) == []
    held = [s for split in ("train", "validation", "held_out") for s in HiddenStates(states, split)]
    assert {s.source_id for s in held} == {r.source_id for r in rows} - longer - broken
    assert all(s.aux.isfinite().all() for s in held)


def adopt_conversations(run: RunFolder, config: Any) -> None:
    """Let `generate` count as done with these settings."""
    origin = run.origin("generate")
    assert origin
    wanted = pipeline(config)._origin("generate")
    run.write_origin(origin.model_copy(update={"settings": wanted.settings, "target": wanted.target}))


DEADLY = '''
import os
import torch
from transformers import LlamaForCausalLM

class DeadlyForCausalLM(LlamaForCausalLM):
    """Kills its process when a certain token is read."""
    def __init__(self, config):
        super().__init__(config)
        self.model.register_forward_pre_hook(self._look, with_kwargs=True)

    def _look(self, module, args, kwargs):
        ids = kwargs.get("input_ids", args[0] if args else None)
        if ids is not None and not ids.is_meta and (ids == self.config.deadly_token).any():
            os.kill(os.getpid(), 9)
'''


def test_a_sample_that_kills_fresh_actors_is_set_aside(generated: Path, tmp_path: Path, target_folder: Path) -> None:
    rows = list(read_conversations(RunFolder.open(str(generated / "run")).of("generate")))
    used: dict[int, list[str]] = {}
    for row in rows:
        for token in set(row.input_ids):
            used.setdefault(token, []).append(row.source_id)
    token, [victim] = next((t, s) for t, s in sorted(used.items(), reverse=True) if len(s) == 1)
    target = tmp_path / "deadly"
    shutil.copytree(target_folder, target)
    (target / "modeling_deadly.py").write_text(DEADLY)
    config_json = json.loads((target / "config.json").read_text())
    config_json |= {"deadly_token": token, "auto_map": {"AutoModelForCausalLM": "modeling_deadly.DeadlyForCausalLM"}}
    (target / "config.json").write_text(json.dumps(config_json))

    folder = start_after_generate(generated, tmp_path / "run")
    config = tiny_config(folder, target, extract={"actors": 2, "unit_mib": 0.2})
    config = config.model_copy(update={"target": config.target.model_copy(update={"trust_remote_code": True})})
    adopt_conversations(RunFolder.open(config.run), config)
    with pytest.raises(QuarantineError, match=rf"1 samples were set aside.*\({victim}\): killed 3 fresh actors"):
        pipeline(config).stage("extract")
    states = states_of(folder)
    assert verify(states) == []
    held = {s.source_id for split in ("train", "validation", "held_out") for s in HiddenStates(states, split)}
    assert held == {r.source_id for r in rows} - {victim}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of 1 MiB; unmounted at the end."""
    place = tmp_path / "disk"
    place.mkdir()
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", place]).returncode:
        pytest.skip("mounting a small tmpfs needs root")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


def test_a_full_disk_is_said_and_extraction_goes_on_when_there_is_space(
    generated: Path, whole: dict[int, bytes], target_folder: Path, small_disk: Path
) -> None:
    folder = start_after_generate(generated, small_disk)
    filler = small_disk / "filler"
    filler.write_bytes(b"\0" * (300 << 10))
    config = tiny_config(folder, target_folder)
    with pytest.raises(DatasetError, match=r"cannot be written \(.*No space left on device.*\)\. Free some space"):
        pipeline(config).stage("extract")
    states = states_of(folder)
    records = read_records(states, read_plan(states))
    assert 0 < len(records) < len(whole)
    filler.unlink()
    subprocess.run(["mount", "-o", "remount,size=16m", small_disk], check=True)
    pipeline(config).stage("extract")
    assert committed(folder) == whole
    assert verify(states) == []
    assert {r.file for r in records.values()} <= {name for name in states.names() if name.endswith(".arrow")}


def test_a_second_run_borrows_what_the_first_captured(
    generated: Path, whole: dict[int, bytes], tmp_path: Path, target_folder: Path
) -> None:
    first = start_after_generate(generated, tmp_path / "first")
    pipeline(tiny_config(first, target_folder)).stage("extract")
    second = start_after_generate(generated, tmp_path / "second")
    config = tiny_config(second, target_folder, extract={"share": [str(first / "run")]})
    watch = Watch()
    pipeline(config, watch).stage("extract")
    assert any("40 samples are borrowed" in said for said in watch.said)
    assert not [name for name in states_of(second).names() if name.endswith(".arrow")]
    assert verify(states_of(second)) == []
    for split in ("train", "validation", "held_out"):
        mine, theirs = HiddenStates(states_of(second), split), HiddenStates(states_of(first), split)
        assert {s.sample_id for s in mine} == {s.sample_id for s in theirs}
        by_id = {s.sample_id: s for s in theirs}
        assert all(torch.equal(s.aux, by_id[s.sample_id].aux) for s in mine)
    pipeline(config).stage("extract", redo=True)
    assert verify(states_of(second)) == []


@pytest.mark.parametrize("state_dtype", ["bfloat16", "float8"])
def test_the_forecast_is_what_extraction_takes(
    generated: Path, tmp_path: Path, target_folder: Path, state_dtype: str
) -> None:
    folder = start_after_generate(generated, tmp_path)
    config = tiny_config(folder, target_folder, extract={"state_dtype": state_dtype})
    made = pipeline(config)
    before = sorted(str(path) for path in (folder / "run").rglob("*"))
    counted = forecast(config, made.run, made.facts, Watch(), seconds=0)
    found = forecast(config, made.run, made.facts, Watch(), seconds=1)
    assert sorted(str(path) for path in (folder / "run").rglob("*")) == before
    outcome = made.stage("extract")
    assert outcome
    records = read_records(states_of(folder), read_plan(states_of(folder))).values()
    assert (found.samples, found.tokens) == (outcome.samples, outcome.tokens)
    assert found.supervised_tokens == sum(r.supervised_tokens for r in records)
    written = sum(r.bytes for r in records)
    assert written * 0.95 < found.bytes < written * 1.05
    assert counted.bytes < found.bytes and counted.seconds is None  # the rows alone, without Arrow's frame
    assert found.tokens_per_second and found.seconds and found.seconds > found.tokens / found.tokens_per_second
    assert found.memory_bytes and found.memory_bytes > 100e6 and found.device == "cpu"


def test_without_conversations_the_forecast_assumes_them(tmp_path: Path, target_folder: Path) -> None:
    write_prompts(tmp_path / "prompts.jsonl", 50)
    config = tiny_config(tmp_path, target_folder, preflight={"tokens_per_sample": 100, "supervised_share": 0.7})
    made = pipeline(config)
    found = forecast(config, made.run, made.facts, Watch(), seconds=0)
    assert (found.assumed, found.samples, found.tokens, found.supervised_tokens) == (True, 50, 5000, 3500)


def test_actors_have_names_to_be_found_by(generated: Path, tmp_path: Path, target_folder: Path) -> None:
    from ray.util import list_named_actors

    seen: set[str] = set()
    folder = start_after_generate(generated, tmp_path)
    config = tiny_config(folder, target_folder, extract={"stages": 2, "cpus": 0.5})
    pipeline(config, Watch(lambda task, amount: seen.update(list_named_actors()))).stage("extract")
    assert {"eagle-extract-1", "eagle-extract-1-stage-0", "eagle-extract-1-stage-1"} <= seen
