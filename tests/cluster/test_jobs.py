"""Stages as real Ray jobs on a real head: their logs, their artifacts, their exit codes, and what they leave behind."""

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from ray.util.state import list_actors

from ray_eagle.conversations.conversation import read_conversations
from ray_eagle.hidden_states.reader import HiddenStates
from ray_eagle.hidden_states.verify import verify
from ray_eagle.run import RunFolder
from ray_eagle.vocab import read_map
from tests.cluster.test_local_sh import RAY, Head, alive

REPO = Path(__file__).parents[2]
BALLAST = 30_000_000
VERSION = "0+submitted"
PROMPTS = 6
Done = subprocess.CompletedProcess[str]


@pytest.fixture(scope="module")
def head() -> Iterator[Head]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    head = Head(ports[0], ports[1])
    started = head.run("start")
    assert started.returncode == 0, started.stderr
    yield head
    assert head.run("stop").returncode == 0
    shutil.rmtree(head.folder, ignore_errors=True)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """This repository as it is in use: with a virtual environment and runs, both far larger than the code."""
    folder = tmp_path_factory.mktemp("checkout") / "repo"
    folder.mkdir()
    for name in ("ray_eagle", "jobs"):
        shutil.copytree(REPO / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(REPO / ".gitignore", folder)
    with (folder / "ray_eagle" / "__init__.py").open("a") as file:
        file.write(f'\n__version__ = "{VERSION}"\n')
    for name in (".venv/lib", "runs/demo/hidden_states", ".cache"):
        (folder / name).mkdir(parents=True)
        with (folder / name / "ballast").open("wb") as file:
            file.truncate(BALLAST)
    return folder


@pytest.fixture(scope="module")
def settings(target_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("jobs")
    lines = [f'{{"id": "p{i}", "turns": ["Question {i} {"abcdefgh"[i] * 9}?"]}}' for i in range(PROMPTS)]
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    return {
        "run": str(folder / "run"),
        "target": {"path": str(target_folder), "dtype": "float32"},
        "generate": {
            "prompts": str(folder / "prompts.jsonl"),
            "max_new_tokens": 8,
            "batch_size": 2,
            "part_size": 3,
            "held_out_share": 0.5,
            "validation_share": 0,
        },
        "vocab": {"size": 100},
        "breakeven": {"steps": [1], "prompts": 2, "max_new_tokens": 4},
    }


def write(folder: Path, settings: dict[str, Any], **changes: Any) -> Path:
    """run.yaml, somewhere else than in the working directory of the job."""
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump({**settings, **changes}))
    return file


def submit(head: Head, checkout: Path, stage: str, file: Path) -> Done:
    words = [RAY, "job", "submit", "--address", head.url, "--working-dir", checkout, "--"]
    env = {name: value for name, value in os.environ.items() if name not in ("RAY_ADDRESS", "PYTHONPATH")}
    command = ["python", f"jobs/{stage}.py", "-c", str(file)]
    return subprocess.run([*words, *command], env=env, cwd="/", capture_output=True, text=True, timeout=120)


def serve_actors(head: Head) -> list[Any]:
    actors = list_actors(address=head.url, detail=True, limit=1000)
    return [a for a in actors if a.class_name.startswith(("ServeController", "ProxyActor", "ServeReplica", "HAProxy"))]


@pytest.fixture(scope="module")
def generated(head: Head, checkout: Path, settings: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Done:
    return submit(head, checkout, "generate", write(tmp_path_factory.mktemp("generate"), settings))


@pytest.fixture(scope="module")
def extracted(
    generated: Done, head: Head, checkout: Path, settings: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> Done:
    return submit(head, checkout, "extract", write(tmp_path_factory.mktemp("extract"), settings))


def test_generate_is_a_job_that_shows_progress_and_leaves_conversations(
    generated: Done, settings: dict[str, Any]
) -> None:
    assert generated.returncode == 0, generated.stdout + generated.stderr
    assert f"generate: {PROMPTS} of {PROMPTS} prompts, " in generated.stdout
    assert "eta 0 s" in generated.stdout
    assert "generate: done in " in generated.stdout
    run = RunFolder.open(settings["run"])
    origin = run.finished("generate")
    assert origin is not None
    assert origin.versions["ray_eagle"] == VERSION  # the submitted code, not what is installed there
    conversations = list(read_conversations(run.of("generate")))
    assert sorted(c.source_id for c in conversations) == [f"p{i}" for i in range(PROMPTS)]
    assert {c.split for c in conversations} == {"train", "held_out"}


def test_extract_is_a_job_that_shows_progress_and_leaves_a_sound_dataset(
    extracted: Done, settings: dict[str, Any]
) -> None:
    assert extracted.returncode == 0, extracted.stdout + extracted.stderr
    assert " tokens, " in extracted.stdout
    assert "eta 0 s" in extracted.stdout
    assert "extract: done in " in extracted.stdout
    folder = RunFolder.open(settings["run"]).of("extract")
    assert verify(folder, lambda done, total: None) == []
    assert len(HiddenStates(folder, "train")) + len(HiddenStates(folder, "held_out")) == PROMPTS


def test_the_working_directory_is_uploaded_without_the_environment_and_runs(
    generated: Done, head: Head, checkout: Path
) -> None:
    unpacked = head.folder / "ray" / "session_latest" / "runtime_resources" / "working_dir_files"
    files = [p for p in unpacked.rglob("*") if p.is_file()]
    assert [p for p in files if p.match("*/jobs/generate.py")]  # the right place to look
    assert [p for p in files if p.name == "ballast"] == []
    assert sum(p.stat().st_size for p in files) < 5_000_000
    assert sum(p.stat().st_size for p in checkout.rglob("*") if p.is_file()) > 3 * BALLAST


def test_the_command_submits_itself_follows_its_log_and_exits_as_the_job_did(
    extracted: Done, head: Head, settings: dict[str, Any], tmp_path: Path
) -> None:
    words = [sys.executable, "-m", "ray_eagle", "vocab", "-c", str(write(tmp_path, settings)), "--address", head.url]
    env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("job eagle-vocab-")
    assert any(line.startswith("vocab: 100 of 261 tokens cover ") for line in lines)
    assert lines[-1].endswith(" succeeded")
    d2t, t2d = read_map(RunFolder.open(settings["run"]).of("vocab"))
    assert (len(d2t), int(t2d.sum())) == (100, 100)


def test_a_relative_run_folder_is_refused(head: Head, checkout: Path, settings: dict[str, Any], tmp_path: Path) -> None:
    done = submit(head, checkout, "generate", write(tmp_path, settings, run="runs/demo"))
    assert done.returncode != 0
    assert "error: run folder 'runs/demo' is relative, but a job runs in a directory of its own." in done.stdout
    assert "Traceback" not in done.stdout


def test_a_job_that_fails_says_why_in_one_line(
    head: Head, checkout: Path, settings: dict[str, Any], tmp_path: Path
) -> None:
    changes = {"target": {"path": str(tmp_path / "missing")}, "run": str(tmp_path / "run")}
    done = submit(head, checkout, "extract", write(tmp_path, settings, **changes))
    assert done.returncode != 0
    expected = f"no target: {tmp_path / 'missing'}: expected a folder with config.json, found nothing."
    assert [line for line in done.stdout.splitlines() if line.startswith(f"error: {expected}")]
    assert "Traceback" not in done.stdout


def test_a_job_that_serves_leaves_nothing_of_serve(
    head: Head, checkout: Path, settings: dict[str, Any], tmp_path: Path
) -> None:
    run = RunFolder.open(str(tmp_path / "run"))
    done = submit(head, checkout, "breakeven", write(tmp_path, settings, run=run.path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "breakeven: with 1 draft steps at concurrency 1 a drafter must reach " in done.stdout
    [row] = run.of("breakeven").read_json("breakeven.json")["measured"]["rows"]
    assert (row["steps"], row["needed"] > 0) == (1, True)

    answer = httpx.get(f"{head.url}/api/serve/applications/", timeout=20, trust_env=False)
    assert answer.json()["applications"] == {}
    actors = serve_actors(head)
    assert {a.class_name.partition(":")[0] for a in actors} >= {"ServeController", "ServeReplica"}  # there were some
    assert [(a.class_name, a.state) for a in actors if a.state != "DEAD"] == []
    deadline = time.monotonic() + 10  # a process takes a moment to end
    while (left := [a.pid for a in actors if a.pid and alive(a.pid)]) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert left == []
