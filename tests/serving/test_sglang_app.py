"""The sglang engine in the Serve app, on a stand-in for its server: restarts, refusals, and nothing left behind."""

import contextlib
import io
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from ray import serve
from rich.console import Console

from ray_eagle.config import Config
from ray_eagle.drafter.checkpoint import save_drafter
from ray_eagle.errors import InputError, ServingError
from ray_eagle.probing.reports import ProbePrompt
from ray_eagle.probing.sweep import probe_with
from ray_eagle.report.model import build_report
from ray_eagle.report.table import render
from ray_eagle.serving import supervisor
from ray_eagle.serving.app import deployed
from ray_eagle.serving.child import free_port
from ray_eagle.serving.client import HttpClient
from ray_eagle.serving.engine import Speculation
from tests.ray.pipeline import Watch, pipeline, start_after_generate, tiny_config
from tests.standin import expected_passes, plain_answer, write_interpreter
from tests.tiny import tiny_drafter, tiny_shape

PROMPTS = [
    ProbePrompt(id=f"p{i}", category=("even", "odd")[i % 2], input_ids=[*range(1 + i), 30 * i % 180]) for i in range(12)
]


def settings(target: Path, folder: Path, mode: str = "ok", **serving: Any) -> Config:
    env = {"STANDIN_VERSION": "0.5.17", "STANDIN_MODE": mode, "STANDIN_FILE": str(folder / "file")}
    engine = {
        "engine": "sglang",
        "python": str(write_interpreter(folder)),
        "env": env,
        "cpus": 0.5,
        "max_running": 4,
        "start_s": 60,
        **serving,
    }
    return Config.model_validate({"target": {"path": str(target)}, "serve": engine})


@pytest.fixture(scope="module")
def drafter_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("drafter") / "d"
    save_drafter(tiny_drafter(tiny_shape(), seed=2), folder)
    return folder


@pytest.fixture(scope="module", autouse=True)
def one_serve(cluster: None) -> Iterator[None]:
    """Serve itself, started once: `deployed` leaves it alone then."""
    serve.start(http_options={"host": "127.0.0.1", "port": free_port()})
    yield
    serve.shutdown()


@pytest.fixture(autouse=True)
def nothing_left(tmp_path: Path) -> Iterator[None]:
    """No process of the test's servers outlives it by 20 s, whatever the test does to them."""
    yield
    wait_for(lambda: not processes(tmp_path), 20, lambda: f"left: {processes(tmp_path)}")
    assert serve.status().applications == {}


def wait_for(what: Callable[[], bool], seconds: float, found: Callable[[], str] = lambda: "") -> float:
    began = time.monotonic()
    while not what():
        assert time.monotonic() - began < seconds, found()
        time.sleep(0.05)
    return time.monotonic() - began


def processes(folder: Path) -> dict[int, str]:
    """Command lines of everything that the servers of one test started."""
    found = {}
    for pid in supervisor.owned():
        with contextlib.suppress(OSError):
            if f"STANDIN_FILE={folder}/" in Path(f"/proc/{pid}/environ").read_text():
                found[pid] = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    return found


def servers(folder: Path) -> list[int]:
    return [
        pid for pid, words in processes(folder).items() if "launch_server" in words and "supervisor.py" not in words
    ]


def test_a_sweep_over_settings_and_concurrencies(target_folder: Path, drafter_folder: Path, tmp_path: Path) -> None:
    notes: list[tuple[int, int, str]] = []
    with deployed(settings(target_folder, tmp_path), drafter_folder=drafter_folder) as app:
        info = app.info()
        assert (info.engine, info.versions["sglang"], info.dtype) == ("sglang", "0.5.17", "bfloat16")
        with HttpClient(app.url) as http:
            reply = http.generate(input_ids=[5, 6], max_new_tokens=20)
            assert reply.tokens == plain_answer([5, 6], 20)
            assert [(p.start, p.accepted) for p in reply.passes] == expected_passes([5, 6], 20, 3)
            assert http.engine() == app.engine()
            assert http.health().ok
            with pytest.raises(InputError, match=r"decodes 3 steps.*POST /configure"):
                http.generate(input_ids=[5, 6], steps=2)
            http.configure(Speculation(steps=3, simulated=2))
            with pytest.raises(InputError, match=r"pretends that each cycle yields 2 tokens.*POST /configure"):
                http.generate(input_ids=[5, 6])
        report = probe_with(
            app,
            PROMPTS,
            engine="sglang",
            settings=[Speculation(steps=3), Speculation(steps=1)],
            concurrencies=[1, 4],
            temperature=0.0,
            max_new_tokens=40,
            plain_prompts=4,
            resamples=200,
            progress=lambda *note: notes.append(note),
        )
    best = {row.concurrency: row for row in report.sweep if row.best}
    assert {(r.steps, r.concurrency) for r in report.sweep} == {(3, 1), (3, 4), (1, 1), (1, 4)} and set(best) == {1, 4}
    for row in report.sweep:
        numbers = range(12) if row.concurrency == 1 else [0, 2, 3, 5, 6, 8, 9, 11]
        passes = []
        for number in numbers:
            ids = PROMPTS[number].input_ids
            last = len(ids) + 39
            expected = expected_passes(ids, 40, row.steps)
            passes += [j for start, j in expected if start + 1 + row.steps <= last]
        assert row.verify_passes == len(passes)
        assert row.acceptance_length == pytest.approx(1 + sum(passes) / len(passes))
        assert 0 < row.break_even < 3 and row.speedup == pytest.approx(row.acceptance_length / row.break_even)
    assert report.steps == best[1].steps and report.prompts == 12
    assert report.plain_identical_share == 1 and report.differences == [] and report.engine == "sglang 0.5.17"
    assert report.verdict == "serve" and "--speculative-num-steps" in " ".join(report.reasons)
    assert [note[:2] for note in notes] == [(i + 1, 52) for i in range(52)]


def test_a_probe_leaves_the_server_drafting_as_it_was(
    target_folder: Path, drafter_folder: Path, tmp_path: Path
) -> None:
    items = [{"id": p.id, "input_ids": p.input_ids} for p in PROMPTS[:4]]
    body = {"prompts": items, "steps": 1, "max_new_tokens": 12, "plain_prompts": 2, "resamples": 20}
    with (
        deployed(settings(target_folder, tmp_path), drafter_folder=drafter_folder) as app,
        HttpClient(app.url) as http,
    ):

        def as_before() -> bool:
            with contextlib.suppress(ServingError):  # it restarts
                return http.engine().speculation == Speculation(steps=3)
            return False

        answer = httpx.post(f"{app.url}/probe", json=body, headers={"Accept": "application/json"}, timeout=60)
        assert answer.status_code == 200 and answer.json()["steps"] == 1
        assert http.generate(input_ids=[5, 6], max_new_tokens=9).tokens == plain_answer([5, 6], 9)
        with httpx.stream("POST", f"{app.url}/probe", json=body, timeout=60) as lines:
            next(lines.iter_lines())  # and leaves
        wait_for(as_before, 30)
        reply = http.generate(input_ids=[5, 6], max_new_tokens=9)
        assert [(p.start, p.accepted) for p in reply.passes] == expected_passes([5, 6], 9, 3)


def test_the_stages_measure_on_it(generated: Path, drafter_folder: Path, tmp_path: Path, target_folder: Path) -> None:
    folder = start_after_generate(generated, tmp_path / "given")
    serving = settings(target_folder, tmp_path).serve.model_dump()
    config = tiny_config(
        folder,
        target_folder,
        serve=serving,
        drafter={"path": str(drafter_folder)},
        probe={"steps": 2, "sweep": [{"steps": 1}], "concurrencies": [1, 2], "max_new_tokens": 16, "resamples": 50},
        breakeven={"steps": [2], "concurrencies": [1, 2], "prompts": 2, "max_new_tokens": 12},
    )
    watch = Watch()
    pipe = pipeline(config, watch)
    pipe.stage("breakeven")
    pipe.stage("probe-given")
    report = build_report(config, pipe.run)
    assert report.break_even_before_training.keys() == {2}
    assert any("each yielded 2.5 tokens" in line for line in watch.said)
    assert any("at concurrency 1 you need" in line and "at 2 you need" in line for line in watch.said)
    assert {(row.steps, row.concurrency) for row in report.sweep} == {(2, 1), (2, 2), (1, 1), (1, 2)}
    assert report.engine == "sglang 0.5.17" and report.plain_identical_share == 1
    assert report.verdict == "serve" and f"--speculative-num-steps {report.steps}" in " ".join(report.reasons)
    assert any("mean context" in note for note in report.notes)
    shown = io.StringIO()
    Console(file=shown, width=200).print(render(report))
    assert "Every setting measured" in shown.getvalue()


def test_a_server_that_dies_at_start_is_explained_by_its_log(
    target_folder: Path, drafter_folder: Path, tmp_path: Path
) -> None:
    with (
        pytest.raises(
            ServingError, match=r"(?s)did not start: sglang: the server ended.*\n    CUDA out of memory"
        ) as caught,
        deployed(settings(target_folder, tmp_path, "dies"), drafter_folder=drafter_folder),
    ):
        pass
    assert "Traceback" not in str(caught.value)


def test_serve_starts_another_replica_when_the_server_dies(
    target_folder: Path, drafter_folder: Path, tmp_path: Path
) -> None:
    with deployed(settings(target_folder, tmp_path), drafter_folder=drafter_folder) as app:
        first = app.engine().server
        [pid] = servers(tmp_path)
        os.kill(pid, signal.SIGKILL)

        def another() -> bool:
            try:
                return app.engine().server != first
            except ServingError:
                return False

        wait_for(another, 60)
        assert app.generate(input_ids=[5], max_new_tokens=9).tokens == plain_answer([5], 9)
        assert len(servers(tmp_path)) == 1


@pytest.mark.parametrize("way", ["replica", "supervisor", "delete"])
def test_nothing_of_the_server_survives(target_folder: Path, drafter_folder: Path, tmp_path: Path, way: str) -> None:
    """Its grandchild ignores SIGTERM and has a session of its own, as the worst of servers."""
    with deployed(settings(target_folder, tmp_path), drafter_folder=drafter_folder) as app:
        found = processes(tmp_path)
        assert len(found) >= 4, found  # supervisor, guard, server, grandchild
        if way == "delete":
            serve.delete("ray-eagle")
        else:
            pid = app.info().pid
            victim = pid if way == "replica" else next(p for p in found if parent(p) == pid)
            os.kill(victim, signal.SIGKILL)
        wait_for(lambda: not found.keys() & processes(tmp_path).keys(), 20, lambda: str(processes(tmp_path)))


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
