"""`generate` with servers: exact ids, resume, and servers and drivers that die; no prompt is lost or answered twice."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from ray_eagle.config import TargetConfig
from ray_eagle.conversations.conversation import Conversation, read_conversations
from ray_eagle.conversations.keep import conversations_of
from ray_eagle.conversations.mask import Renderer
from ray_eagle.conversations.prompts import hashed_split
from ray_eagle.conversations.template import render_next_turn, render_prompt, stop_ids
from ray_eagle.errors import OriginError, ServingError
from ray_eagle.preflight.servers import check_servers
from ray_eagle.serving.app import deployed
from ray_eagle.serving.child import free_port
from ray_eagle.stages import Pipeline, copy_config
from ray_eagle.target.loading import read_facts
from tests.answers import said, written
from tests.ray.answering import start_server, trial
from tests.ray.pipeline import Watch, pipeline, tiny_config
from tests.tiny import tiny_shape
from tests.unit.test_template import merging_target


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """A server that does not fail."""
    port = free_port()
    process = start_server(port, 0)
    yield f"http://127.0.0.1:{port}"
    process.kill()
    process.wait()


def run_of(folder: Path, target: Path, backend: str, url: str, **more: Any) -> Pipeline:
    settings = {"backend": backend, "urls": [url], "timeout_s": 20, "server_wait_s": 5, **more}
    return pipeline(tiny_config(folder, target, generate=settings))


def conversations(run: Pipeline) -> dict[str, Conversation]:
    return {c.source_id: c for c in read_conversations(run.run.of("generate"))}


def test_failing_servers_and_a_killed_driver_give_each_prompt_its_conversation_once(
    tmp_path: Path, target_folder: Path
) -> None:
    """`python -m tests.ray.answering` runs it with 10,000 prompts, and kills the driver three times."""
    figures = trial(tmp_path, target_folder, prompts=1000, kills=1)
    assert all(figures["servers"][fault] > 0 for fault in ("failed", "stalled", "cut"))


def test_ids_from_sglang_are_stored_as_produced_where_tokenizing_again_would_merge(tmp_path: Path, server: str) -> None:
    target = merging_target(tmp_path / "target")
    run = run_of(tmp_path, target, "sglang", server)
    run.stage("generate")
    tokenizer = AutoTokenizer.from_pretrained(target)
    found, others = conversations(run), 0
    assert len(found) == 40
    for c in found.values():
        users = [m["content"] for m in c.messages if m["role"] == "user"]
        ids, spans = render_prompt(tokenizer, users[0]), []  # the twin: turn by turn, one request at a time
        for turn, user in enumerate(users):
            if turn:
                ids = ids + render_next_turn(tokenizer, c.messages[: 2 * turn], user, end_of_turn="<|end|>")
            answer = written(ids, tokenizer.eos_token_id)
            spans.append([len(ids), len(ids) + len(answer)])
            ids = ids + answer
            others += tokenizer(tokenizer.decode(answer), add_special_tokens=False)["input_ids"] != answer
        assert (c.input_ids, c.supervised, c.mask) == (ids, spans, "generated")
        assert c.finish_reasons == ["stop"] * len(users)
    assert others > 20, "tokenized again, many answers would have other ids"


def test_text_from_openai_becomes_what_the_path_of_kept_answers_makes(
    tmp_path: Path, target_folder: Path, server: str
) -> None:
    run = run_of(tmp_path, target_folder, "openai", server)
    run.stage("generate")
    tokenizer = AutoTokenizer.from_pretrained(target_folder)
    renderer = Renderer(tokenizer, stop_ids(target_folder, tokenizer), ("<think>\n", "\n</think>\n\n"))
    found = conversations(run)
    assert len(found) == 40
    for c in found.values():
        messages: list[dict[str, Any]] = []
        for user in [m["content"] for m in c.messages if m["role"] == "user"]:
            messages.append({"role": "user", "content": user})
            messages.append(said(messages))
        assert c.messages == messages
        ((_, twin),) = conversations_of(renderer, messages, [], run.config.generate, 512)
        assert (c.input_ids, c.supervised, c.mask) == (twin["input_ids"], twin["supervised"], "rendering")
    assert not any("renders another template" in line for line in run.progress.said)
    summary = run.run.of("generate").read_json("summary.json")
    assert summary["answers_with_reasoning"] == sum(
        "reasoning_content" in m for c in found.values() for m in c.messages
    )


@pytest.mark.usefixtures("cluster")
def test_a_server_of_this_project_answers_as_the_target_here(tmp_path: Path, target_folder: Path) -> None:
    embedded = pipeline(tiny_config(tmp_path / "a", target_folder, generate={"limit": 16}))
    embedded.stage("generate")
    config = tiny_config(tmp_path / "b", target_folder, serve={"dtype": "float32"})
    with deployed(config, random_shape=tiny_shape()) as app:
        run = run_of(tmp_path / "b", target_folder, "ray_eagle", app.url, limit=16)
        assert [f.level for f in check_servers(run.config.generate, run.facts)] == ["ok"]
        run.stage("generate")
    wanted = conversations(embedded)
    assert conversations(run) == wanted and len(wanted) == 16
    assert {c.mask for c in wanted.values()} == {"generated"}


def test_refused_prompts_are_rejected_and_counted_and_a_stopped_run_goes_on(
    tmp_path: Path, target_folder: Path, server: str
) -> None:
    rows = [{"id": f"p{i}", "turns": ["refuse me" if i % 7 == 0 else f"question {i}"]} for i in range(60)]
    rows[1]["turns"] += ["refuse me too"]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + "{broken\n")
    run = run_of(tmp_path, target_folder, "openai", server, in_flight=4)

    class Stop(Exception):
        pass

    def stop(task: str, amount: float) -> None:
        raise Stop

    with pytest.raises(Stop):
        Pipeline(run.config, run.run, Watch(stop)).stage("generate")
    folder = run.run.of("generate")
    before = {name: folder.read_bytes(name) for name in folder.names() if name.startswith("part-")}
    assert 0 < len(before) < 6
    run.stage("generate")
    assert {name: folder.read_bytes(name) for name in before} == before
    rejected = folder.read_jsonl("rejected.jsonl")
    assert [r["row"] for r in rejected if "broken JSON" in r["reason"]] == [61]
    refused = {r["source_id"]: r for r in rejected if "I do not like it" in r["reason"]}
    assert set(refused) == {f"p{i}" for i in range(0, 60, 7)} and refused["p7"]["row"] == 8
    found = conversations(run)
    assert set(found) == {f"p{i}" for i in range(60)} - set(refused)
    assert found["p1"].note == "ended before turn 2: refused by the server: HTTP 400: I do not like it"
    summary = folder.read_json("summary.json")
    assert summary["rows"] == {"read": 61, "kept": 51, "rejected": 10}


@pytest.mark.parametrize(
    ("shares", "warning"),
    [
        ({"validation_share": 0}, "no validation prompt, so training has nothing to choose a checkpoint by."),
        ({"validation_share": 0.999, "held_out_share": 0}, "no train prompt, so training has nothing to learn from."),
        ({}, "no validation conversation, so training has nothing to choose a checkpoint by."),
    ],
)
def test_a_split_without_a_prompt_or_an_answer_is_warned_of_once(
    tmp_path: Path, target_folder: Path, server: str, shares: dict[str, float], warning: str
) -> None:
    splits = {"held_out_share": 0.2, "validation_share": 0.2} | shares
    rows = [(f"p{i}", hashed_split(f"p{i}", splits["held_out_share"], splits["validation_share"])) for i in range(40)]
    refused = None if shares else "validation"
    asked = [{"id": name, "turns": ["refuse me" if split == refused else f"say {name}"]} for name, split in rows]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in asked))
    run = run_of(tmp_path, target_folder, "openai", server, near_duplicate=1, **splits)
    run.stage("generate")
    (told,) = [line for line in run.progress.said if "generate: warning: no " in line]
    assert warning in told


def test_where_the_servers_are_may_change_but_not_who_answers(
    tmp_path: Path, target_folder: Path, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EAGLE_TEST_KEY", "s3cret")
    run = run_of(tmp_path, target_folder, "openai", server, api_key_env="EAGLE_TEST_KEY")
    copy_config(run.config, run.run)
    run.stage("generate")
    texts = [path.read_text() for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert texts and not any("s3cret" in text for text in texts)
    more = {"in_flight": 7, "tries": 2, "timeout_s": 9, "server_wait_s": 3}
    moved = run_of(tmp_path, target_folder, "openai", "http://127.0.0.1:9", **more)
    assert moved.stage("generate") is None, "done already"
    with pytest.raises(OriginError, match=r"settings\.generate\.backend: 'openai' -> 'sglang'"):
        run_of(tmp_path, target_folder, "sglang", server).stage("generate")
    with pytest.raises(OriginError, match=r"settings\.generate\.model: None -> 'x'"):
        run_of(tmp_path, target_folder, "openai", server, model="x").stage("generate")


def test_a_server_that_renders_another_template_is_told_of_once(tmp_path: Path, server: str) -> None:
    run = run_of(tmp_path, merging_target(tmp_path / "target"), "openai", server)  # its tokenizer merges: fewer tokens
    run.stage("generate")
    (told,) = [line for line in run.progress.said if "renders another template" in line]
    assert "generate: warning: the server counts " in told and "chat template gives" in told


def test_wrong_models_and_dead_servers_are_one_error(tmp_path: Path, target_folder: Path, server: str) -> None:
    with pytest.raises(ServingError, match=r"expected the model 'other', found the-target"):
        run_of(tmp_path / "a", target_folder, "openai", server, model="other").stage("generate")
    with pytest.raises(ServingError, match=r"no server answers for 0\.4 s .* http://127\.0\.0\.1:9: cannot be reached"):
        run_of(tmp_path / "b", target_folder, "openai", "http://127.0.0.1:9", server_wait_s=0.4).stage("generate")


def test_preflight_asks_the_servers(tmp_path: Path, target_folder: Path, server: str) -> None:
    facts = read_facts(TargetConfig(path=str(target_folder)))

    def findings(backend: str, *urls: str, **more: Any) -> list[tuple[str, str]]:
        config = tiny_config(tmp_path, target_folder, generate={"backend": backend, "urls": urls, **more})
        return [(f.level, f.message) for f in check_servers(config.generate, facts)]

    assert findings("openai", server) == [("ok", f"{server} serves the-target.")]
    (level, _), (other, gone) = findings("openai", server, "http://127.0.0.1:9")
    assert (level, other) == ("ok", "warning") and "http://127.0.0.1:9/v1/models: " in gone
    assert findings("openai", "http://127.0.0.1:9")[0][0] == "error"
    assert "expected the model 'x', found the-target" in findings("openai", server, model="x")[0][1]
    assert findings("sglang", server) == [("ok", f"{server} serves /models/tiny.")]
    other_name = check_servers(
        run_of(tmp_path, target_folder, "sglang", server).config.generate, replace(facts, path=tmp_path)
    )
    assert [f.level for f in other_name] == ["warning"] and f"the target is {tmp_path}" in other_name[0].message
    assert "/info: HTTP 404: Not Found" in findings("ray_eagle", server)[0][1]


@pytest.mark.usefixtures("cluster")
def test_cut_answers_can_be_dropped(tmp_path: Path, target_folder: Path) -> None:
    whole = pipeline(tiny_config(tmp_path / "a", target_folder))
    whole.stage("generate")
    run = pipeline(tiny_config(tmp_path / "b", target_folder, generate={"drop_cut": True}))
    run.stage("generate")
    kept, rejected = conversations(run), run.run.of("generate").read_jsonl("rejected.jsonl")
    before = conversations(whole)
    ended = {name for name, c in before.items() if c.finish_reasons[0] == "stop"}
    assert set(kept) == ended and {r["source_id"] for r in rejected} == set(before) - ended
    assert all(set(c.finish_reasons) == {"stop"} for c in kept.values())
    assert rejected and {r["reason"] for r in rejected} == {"the answer was cut at 16 tokens (generate.drop_cut)"}
