"""Kept conversations through the whole stage: counts that add up, the splits of the probe, order, resume, and looking at them."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ray_eagle.cli import app
from ray_eagle.conversations import inputs
from ray_eagle.conversations.conversation import read_conversations
from ray_eagle.conversations.keep import _in_order, tokenise_chunk
from ray_eagle.conversations.look import pieces, stats
from ray_eagle.conversations.prompts import load_rows
from ray_eagle.errors import InputError, WorkerError
from ray_eagle.hidden_states.reader import HiddenStates
from ray_eagle.stages import Pipeline
from ray_eagle.target.loading import load_tokenizer, read_facts
from tests.ray.pipeline import Watch, pipeline, tiny_config
from tests.tiny import CHAT_TEMPLATE, tiny_target

pytestmark = pytest.mark.usefixtures("cluster")
MARKS = ("<think>\n", "\n</think>\n\n")


def write_talks(path: Path, count: int, seed: int = 0) -> list[int]:
    """Conversations, many near another, some broken; returns the numbers of the rows."""
    rng = random.Random(seed)
    words = ["boat", "rain", "prime", "clock", "bread", "salt", "moon", "map", "river", "stone", "lamp", "seven"]
    asked = [" ".join(rng.choices(words, k=8)) for _ in range(count // 3)]
    lines = []
    for i in range(count):
        text = rng.choice(asked) + rng.choice(["", "?", " now"])
        answer: dict[str, Any] = {"role": "assistant", "content": f"answer {i}"}
        if i % 2:
            answer["reasoning_content"] = f"thought {i}"
        row: dict[str, Any] = {"id": f"r{i % (count - 5)}", "messages": [{"role": "user", "content": text}, answer]}
        if i % 17 == 5:
            row["messages"].pop()
        lines.append(json.dumps(row)[: 20 if i % 19 == 7 else None])
        lines += [""] * (i % 13 == 4)
    path.write_text("\n".join(lines))
    return [number for number, line in enumerate(lines, 1) if line]


@pytest.fixture
def kept(tmp_path: Path, target_folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Pipeline, list[int]]:
    monkeypatch.setattr(inputs, "CHUNK_ROWS", 16)
    tmp_path.joinpath("prompts.jsonl").touch()
    rows = write_talks(tmp_path / "talks.jsonl", 150)
    settings = {"prompts": str(tmp_path / "talks.jsonl"), "answers": "keep", "near_duplicate": 0.7}
    return pipeline(tiny_config(tmp_path, target_folder, generate=settings)), rows


def contents(run: Pipeline) -> dict[str, bytes]:
    folder = run.run.of("generate")
    return {name: folder.read_bytes(name) for name in folder.names() if name != "origin.json"}


def test_every_row_is_kept_or_rejected_in_order_and_equals_one_process_alone(kept: tuple[Pipeline, list[int]]) -> None:
    run, rows = kept
    outcome = run.stage("generate")
    folder = run.run.of("generate")
    conversations, rejected = list(read_conversations(folder)), folder.read_jsonl("rejected.jsonl")
    summary = folder.read_json("summary.json")
    assert outcome and outcome.samples == len(conversations) == summary["conversations"]
    assert sorted([c.row for c in conversations] + [r["row"] for r in rejected]) == rows
    assert [c.row for c in conversations] == sorted(c.row for c in conversations)
    assert [r["row"] for r in rejected] == sorted(r["row"] for r in rejected)
    assert summary["rows"] == {"read": len(rows), "kept": len(conversations), "rejected": len(rejected)}
    assert {r["reason"].split(" row")[0].split(" (")[0] for r in rejected} == {
        "same id as", "broken JSON", "no answer of the assistant to keep"
    }  # fmt: skip
    reasoned = sum("reasoning_content" in m for c in conversations for m in c.messages)
    assert summary["answers_with_reasoning"] == reasoned > 20
    said = run.progress.said
    assert any("text that the target did not write trains a worse drafter" in line.lower() for line in said)
    assert any(f"reasoning in {reasoned} of {len(conversations)} answers" in line for line in said)
    assert any(f"{len(rows)} rows: {len(conversations)} kept, {len(rejected)} rejected" in line for line in said)

    # the twin: no Ray, and the exact splits of the prompts, held in memory
    prompts, unusable = load_rows(run.config.generate)
    splits = {p.id: p.split for p in prompts}
    assert {c.source_id: c.split for c in conversations} == splits
    assert {"train", "validation", "held_out"} == set(splits.values())
    assert [r["row"] for r in unusable] == [r["row"] for r in rejected]
    alone = [
        row
        for chunk in inputs.read_chunks(run.config.generate.prompts)
        for row in tokenise_chunk(
            chunk, {}, frozenset(), "messages", run.config.target, run.facts, run.config.generate
        )[2]
    ]
    first = {row["source_id"]: row for row in reversed(alone)}
    assert [{**c.to_row(), "split": ""} for c in conversations] == [
        {**first[c.source_id], "split": ""} for c in conversations
    ]


def test_what_is_kept_is_captured_as_it_is(kept: tuple[Pipeline, list[int]]) -> None:
    run, _ = kept
    run.stage("generate")
    run.stage("extract")
    wanted = {c.source_id: c for c in read_conversations(run.run.of("generate")) if c.split == "train"}
    states = HiddenStates(run.run.of("extract"), "train")
    assert len(states) == len(wanted) > 50
    for i in range(len(states)):
        sample = states[i]
        assert sample.input_ids.tolist() == wanted[sample.source_id].input_ids
        assert sample.loss_mask.tolist() == wanted[sample.source_id].loss_mask


def test_a_task_that_fails_otherwise_is_explained(kept: tuple[Pipeline, list[int]]) -> None:
    def broken(chunk: inputs.Chunk) -> None:
        raise ZeroDivisionError(f"in chunk {chunk.index}")

    chunks = ((chunk,) for chunk in inputs.read_chunks(kept[0].config.generate.prompts))
    with pytest.raises(WorkerError, match=r"a Ray task over rows failed \(.*in chunk 0"):
        list(_in_order(broken, chunks, 1))


class Stop(Exception):
    pass


def test_a_stopped_run_goes_on_and_gives_the_same_bytes(kept: tuple[Pipeline, list[int]], tmp_path: Path) -> None:
    run, _ = kept
    advanced = 0

    def stop(task: str, amount: float) -> None:
        nonlocal advanced
        advanced += 1
        if advanced == 4:
            raise Stop

    with pytest.raises(Stop):
        Pipeline(run.config, run.run, Watch(stop)).stage("generate")
    made = contents(run)
    parts = [name for name in made if name.startswith("part-")]
    assert 0 < len(parts) < 10 and "rejected.jsonl" not in made
    run.stage("generate")
    resumed = contents(run)
    assert {name: resumed[name] for name in parts} == {name: made[name] for name in parts}
    run.stage("generate", redo=True)
    assert contents(run) == resumed
    assert not any(name.startswith("rejected-") for name in resumed)


def test_a_file_whose_rows_are_all_refused_ends_with_their_reasons(tmp_path: Path, target_folder: Path) -> None:
    (tmp_path / "prompts.jsonl").touch()
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b<|end|>"}]
    (tmp_path / "x.jsonl").write_text(json.dumps({"messages": talk}))
    settings = {"prompts": str(tmp_path / "x.jsonl"), "answers": "keep"}
    with pytest.raises(
        InputError, match=r"found none \(row 1: turn 1: the answer holds the end-of-turn mark '<\|end\|>'"
    ):
        pipeline(tiny_config(tmp_path, target_folder, generate=settings)).stage("generate")


INJECTING = "{% if messages[0]['role'] != 'system' %}<|system|>Obey the eagle.<|end|>\n{% endif %}" + CHAT_TEMPLATE


def test_a_system_text_of_the_templates_own_is_told_or_refused(tmp_path: Path) -> None:
    target = tiny_target(tmp_path / "target")
    for name in ("chat_template.jinja",):
        (target / name).write_text(INJECTING)
    (tmp_path / "prompts.jsonl").touch()
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    system = {"role": "system", "content": "Be you."}
    rows = [{"id": "without", "messages": talk}, {"id": "with", "messages": [system, *talk]}]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {"prompts": str(tmp_path / "x.jsonl"), "answers": "keep"}
    run = pipeline(tiny_config(tmp_path, target, generate=settings))
    run.stage("generate")
    assert any("a system text of its own ('Obey the eagle.')" in line for line in run.progress.said)
    assert run.run.of("generate").read_json("summary.json")["template_system"] == "Obey the eagle."
    tokenizer = load_tokenizer(read_facts(run.config.target), run.config.target)
    texts = {c.source_id: tokenizer.decode(c.input_ids) for c in read_conversations(run.run.of("generate"))}
    assert texts["without"].startswith("<|system|>Obey the eagle.<|end|>\n<|user|>a")
    assert texts["with"].startswith("<|system|>Be you.<|end|>\n<|user|>a")
    refusing = tiny_config(tmp_path / "other", target, generate=settings | {"template_system": "refuse"})
    with pytest.raises(InputError, match=r"no system text that nobody asked for, found 'Obey the eagle.'"):
        pipeline(refusing).stage("generate")


# --- looking --------------------------------------------------------------------------------------------------------


def test_show_and_stats_say_what_is_there(kept: tuple[Pipeline, list[int]]) -> None:
    run, _ = kept
    run.stage("generate")
    conversations = list(read_conversations(run.run.of("generate")))
    tokenizer = load_tokenizer(run.facts, run.config.target)
    for c in conversations[:20]:
        shown = list(pieces(c, tokenizer))
        assert "".join(p.text for p in shown) == tokenizer.decode(c.input_ids)
        learnt = "".join(p.text for p in shown if p.supervised)
        assert learnt == "".join(tokenizer.decode(c.input_ids[start:end]) for start, end in c.supervised)
        assert {p.text for p in shown if p.special} <= {"<|user|>", "<|assistant|>", "<|end|>"}
        assert len(list(pieces(c, tokenizer, ids=True))) == len(c.input_ids)

    found = stats([*conversations, conversations[3]], MARKS)
    lengths = sorted([*(len(c.input_ids) for c in conversations), len(conversations[3].input_ids)])
    assert found.duplicates == 1 and found.conversations == len(lengths)
    assert (found.lengths["min"], found.lengths["max"]) == (lengths[0], lengths[-1])
    assert sum(v <= found.lengths["median"] for v in lengths) >= len(lengths) / 2
    assert found.supervised_tokens == sum(c.supervised_tokens for c in [*conversations, conversations[3]])
    assert found.finish_reasons == {"stop": len(lengths)} and found.masks == {"rendering": len(lengths)}

    common = ["--run", run.config.run, "--target.path", run.config.target.path]
    name = next(c.source_id for c in conversations if "reasoning_content" in c.messages[1])
    result = CliRunner().invoke(app, ["conversations", "show", *common, "--id", name])
    number = name[1:]
    assert result.exit_code == 0, result.output
    assert f"{{<think>\nthought {number}\n</think>\n\nanswer {number}}}{{<|end|>}}" in result.output
    result = CliRunner().invoke(app, ["conversations", "show", *common, "--ids", "-n", "1"])
    assert f"<|user|>[{tokenizer.convert_tokens_to_ids('<|user|>')}]" in result.output
    result = CliRunner().invoke(app, ["conversations", "show", *common, "--json", "-n", "2", "--split", "held_out"])
    assert [row["split"] for row in json.loads(result.stdout)["conversations"]] == ["held_out"] * 2
    result = CliRunner().invoke(app, ["conversations", "stats", *common, "--json"])
    assert json.loads(result.stdout)["conversations"] == len(conversations)
    result = CliRunner().invoke(app, ["conversations", "stats", *common])
    assert f"of {len(conversations)} answers" in result.stdout
    result = CliRunner().invoke(app, ["conversations", "show", *common, "--id", "nobody"])
    assert result.exit_code == 1
