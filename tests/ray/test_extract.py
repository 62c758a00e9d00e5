"""Generation and extraction on real actors: resumable, and nothing lost or doubled when actors are killed."""

import os
import signal
from pathlib import Path

import pytest

from ray_eagle.conversations.conversation import read_conversations
from ray_eagle.conversations.prompts import load_prompts
from ray_eagle.hidden_states.dataset import read_plan, read_records
from ray_eagle.hidden_states.verify import verify
from ray_eagle.run import RunFolder
from ray_eagle.target.loading import load_tokenizer
from tests.ray.pipeline import Watch, committed, pipeline, ray_processes, start_after_generate, tiny_config

pytestmark = pytest.mark.usefixtures("cluster")


def test_conversations_hold_every_prompt_with_exact_ids(generated: Path, target_folder: Path) -> None:
    config = tiny_config(generated, target_folder)
    rows = list(read_conversations(RunFolder.open(config.run).of("generate")))
    prompts = {p.id: p for p in load_prompts(config.generate)}
    assert sorted(c.source_id for c in rows) == sorted(prompts)
    tokenizer = load_tokenizer(pipeline(config).facts, config.target)
    end = tokenizer.eos_token_id
    for row in rows:
        prompt = prompts[row.source_id]
        assert (row.split, row.category) == (prompt.split, prompt.category)
        assert len(row.supervised) == len(row.finish_reasons) == len(prompt.turns)
        assert [m["content"] for m in row.messages if m["role"] == "user"] == list(prompt.turns)
        for (start, stop), reason in zip(row.supervised, row.finish_reasons, strict=True):
            answer = row.input_ids[start:stop]
            assert (answer[-1] == end) == (reason == "stop")
            assert end not in answer[:-1] and len(answer) <= config.generate.max_new_tokens
        first_start = row.supervised[0][0]
        assert tokenizer.decode(row.input_ids[:first_start]) == f"<|user|>{prompt.turns[0]}<|end|>\n<|assistant|>"


def test_greedy_answers_equal_generating_alone(generated: Path, target_folder: Path) -> None:
    import torch

    from ray_eagle.target.stage import load_model

    config = tiny_config(generated, target_folder)
    facts = pipeline(config).facts
    model = load_model(facts, config.target, torch.device("cpu"))
    for row in list(read_conversations(RunFolder.open(config.run).of("generate")))[:8]:
        start, stop = row.supervised[0]
        alone = model.generate(torch.tensor([row.input_ids[:start]]), max_new_tokens=16, do_sample=False)
        assert alone[0, start:].tolist() == row.input_ids[start:stop]


def test_sampling_is_seeded_and_resumes_to_the_same_conversations(tmp_path: Path, target_folder: Path) -> None:
    sampled = {"temperature": 1.0, "top_p": 0.9}
    texts = []
    for name in ("one", "two"):
        config = tiny_config(tmp_path / name, target_folder, generate=sampled)
        if name == "two":  # stopped after the first batch, then resumed

            class Stop(Exception):
                pass

            def stop(task: str, amount: float) -> None:
                raise Stop

            with pytest.raises(Stop):
                pipeline(config, Watch(stop)).stage("generate")
            assert len([n for n in RunFolder.open(config.run).of("generate").names() if n.startswith("part-")]) == 1
        pipeline(config).stage("generate")
        texts.append([c.to_row() for c in read_conversations(RunFolder.open(config.run).of("generate"))])
    assert texts[0] == texts[1] and len(texts[0]) == 40
    greedy = tiny_config(tmp_path / "greedy", target_folder)
    pipeline(greedy).stage("generate")
    assert [c.input_ids for c in read_conversations(RunFolder.open(greedy.run).of("generate"))] != [
        row["input_ids"] for row in texts[0]
    ]


def test_killed_actors_lose_and_double_nothing(generated: Path, tmp_path: Path, target_folder: Path) -> None:
    quiet = start_after_generate(generated, tmp_path / "quiet")
    pipeline(tiny_config(quiet, target_folder)).stage("extract")
    undisturbed = committed(quiet)
    assert len(undisturbed) > 5

    killed: list[int] = []

    def kill(task: str, amount: float) -> None:
        alive = ray_processes("Extractor")
        if task == "extract" and len(killed) < 3 and alive:
            os.kill(alive[0], signal.SIGKILL)
            killed.append(alive[0])

    noisy = start_after_generate(generated, tmp_path / "noisy")
    watch = Watch(kill)
    pipeline(tiny_config(noisy, target_folder, extract={"actors": 2}), watch).stage("extract")
    assert len(set(killed)) == 3
    assert any("actors died and were replaced" in said for said in watch.said)
    assert committed(noisy) == undisturbed
    states = RunFolder.open(str(noisy / "run")).of("extract")
    assert verify(states) == []
    named = {record.file for record in read_records(states, read_plan(states)).values()}
    assert {n for n in states.names() if n.endswith(".arrow")} == named  # what the dead had begun is gone


def test_a_stopped_driver_resumes_without_redoing_committed_units(
    generated: Path, tmp_path: Path, target_folder: Path
) -> None:
    folder = start_after_generate(generated, tmp_path / "stopped")
    config = tiny_config(folder, target_folder)
    done = 0

    def interrupt(task: str, amount: float) -> None:
        nonlocal done
        done += 1
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pipeline(config, Watch(interrupt)).stage("extract")
    states = RunFolder.open(config.run).of("extract")
    before = {unit: record.file for unit, record in read_records(states, read_plan(states)).items()}
    assert 3 <= len(before) < len(read_plan(states).units)
    pipeline(config).stage("extract")
    after = {unit: record.file for unit, record in read_records(states, read_plan(states)).items()}
    assert after.items() >= before.items() and len(after) == len(read_plan(states).units)
    assert verify(states) == []
    assert {n for n in states.names() if n.endswith(".arrow")} == set(after.values())
