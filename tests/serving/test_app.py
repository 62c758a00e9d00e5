"""The server on a real local cluster, over real HTTP and by handle; and what it leaves behind: nothing."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import ray
import torch
from ray import serve
from transformers import LlamaForCausalLM

from ray_eagle.config import Config
from ray_eagle.drafter.checkpoint import save_drafter
from ray_eagle.errors import InputError, ServingError
from ray_eagle.probing.probe import ProbePrompt, ProbeReport, run_breakeven, run_probe
from ray_eagle.serving.app import deployed
from ray_eagle.serving.claim import claimed
from ray_eagle.serving.client import HandleClient, HttpClient
from ray_eagle.serving.reference import ReferenceEngine
from tests.tiny import tiny_drafter, tiny_shape, tiny_target, tiny_tokenizer

TOKEN = "a secret"
PROMPTS = [
    ProbePrompt(id=f"p{i}", category="even" if i % 2 == 0 else "odd", input_ids=[10 + i, 20, 30 + i]) for i in range(5)
]


HOLDS = """
import os, time, ray
from ray_eagle.serving.claim import claimed
ray.init(os.environ["CLUSTER"], log_to_driver=False)
with claimed():
    print("holds", flush=True)
    time.sleep(600)
"""


def head() -> str:
    return str(ray.get_runtime_context().gcs_address)


def settings(target: Path, **sections: dict[str, object]) -> Config:
    serving = {"dtype": "float32", "cpus": 0.5, **sections.pop("serve", {})}
    return Config.model_validate({"target": {"path": str(target)}, "serve": serving, **sections})


def exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def assert_nothing_left(pid: int | None = None) -> None:
    assert serve.status().applications == {}
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        actors = [a["name"] for a in ray.util.list_named_actors(all_namespaces=True) if a["namespace"] == "serve"]
        if not actors and (pid is None or not exists(pid)):
            return
        time.sleep(0.1)
    raise AssertionError(f"left behind: actors {actors}, replica {pid} {'alive' if pid and exists(pid) else 'gone'}")


@pytest.fixture(scope="module")
def drafter_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("drafter") / "d"
    save_drafter(tiny_drafter(tiny_shape(), seed=2), folder, torch.float32)
    return folder


@pytest.fixture(scope="module")
def app(cluster: None, target_folder: Path, drafter_folder: Path) -> Iterator[HandleClient]:
    with deployed(settings(target_folder, serve={"token": TOKEN}), drafter_folder=drafter_folder) as client:
        yield client


@pytest.fixture(scope="module")
def http(app: HandleClient) -> Iterator[HttpClient]:
    with HttpClient(app.url, TOKEN) as client:
        yield client


@pytest.fixture(scope="module")
def engine(target_folder: Path) -> ReferenceEngine:
    """The same models in this process."""
    torch.set_num_threads(1)  # beside the replica on a small machine
    model = LlamaForCausalLM.from_pretrained(target_folder, dtype=torch.float32).eval()
    return ReferenceEngine(model, [model.generation_config.eos_token_id], tiny_drafter(tiny_shape(), seed=2))


def test_it_listens_on_loopback(app: HandleClient) -> None:
    assert app.url.startswith("http://127.0.0.1:")


def test_generate_says_what_was_drafted_and_accepted(
    app: HandleClient, http: HttpClient, engine: ReferenceEngine
) -> None:
    for client in (app, http):
        reply = client.generate(input_ids=[5, 6, 7], max_new_tokens=20, steps=2)
        expected = engine.speculate([5, 6, 7], 20, 2)
        assert (reply.tokens, reply.passes, reply.prompt_length) == (expected.tokens, expected.passes, 3)
        assert reply.text == tiny_tokenizer().decode(expected.tokens, skip_special_tokens=True)
        assert reply.decode_seconds > 0 and reply.prefill_seconds > 0
        plain = client.generate(input_ids=[5, 6, 7], max_new_tokens=20, plain=True)
        assert (plain.tokens, plain.passes) == (expected.tokens, [])


def test_text_and_messages_are_tokenized_as_the_target_does(http: HttpClient) -> None:
    tokenizer = tiny_tokenizer()
    messages = [{"role": "user", "content": "hello"}]
    templated = tokenizer("<|user|>hello<|end|>\n<|assistant|>").input_ids
    by_messages = http.generate(messages=messages, max_new_tokens=9)
    assert by_messages.prompt_length == len(templated)
    assert by_messages.tokens == http.generate(input_ids=templated, max_new_tokens=9).tokens
    by_text = http.generate(text="hello", max_new_tokens=9)
    assert by_text.tokens == http.generate(input_ids=tokenizer("hello").input_ids, max_new_tokens=9).tokens


def test_info_and_health(app: HandleClient, http: HttpClient, target_folder: Path, drafter_folder: Path) -> None:
    info = http.info()
    assert info == app.info()
    assert (info.engine, info.dtype, info.device) == ("reference", "float32", "cpu")
    assert (info.target, info.drafter) == (str(target_folder), str(drafter_folder))
    assert info.shape == tiny_shape()
    assert set(info.target_fingerprint) == {"config", "weights", "tokenizer", "chat_template"}
    assert info.versions["ray"] == ray.__version__
    assert exists(info.pid) and info.pid != os.getpid()
    assert http.health().ok and app.health().seconds > 0


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic a"}])
@pytest.mark.parametrize(
    ("method", "path"), [("GET", "info"), ("GET", "health"), ("POST", "generate"), ("POST", "probe")]
)
def test_no_request_passes_without_the_token(
    app: HandleClient, headers: dict[str, str], method: str, path: str
) -> None:
    body = {"input_ids": [1], "max_new_tokens": 1}
    for json in (body, {"nonsense": 1}):
        response = httpx.request(method, f"{app.url}/{path}", json=json, headers=headers)
        assert response.status_code == 401
        assert "Bearer" in response.json()["error"]


def test_a_client_without_the_token_says_so(app: HandleClient) -> None:
    with HttpClient(app.url) as client, pytest.raises(ServingError, match=r"401.*serve\.token"):
        client.info()


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({}, 422, "exactly one of text, messages and input_ids"),
        ({"text": "a", "input_ids": [1]}, 422, "exactly one"),
        ({"text": "a", "steps": 0}, 422, "steps"),
        ({"text": "a", "max_new_token": 3}, 422, "max_new_token"),
        ({"input_ids": []}, 400, "at least one token"),
        ({"input_ids": [1] * 600}, 400, "at most 512"),
        ({"input_ids": [9999]}, 400, "from 0 to 260"),
        ({"messages": [{"content": "a"}]}, 422, "messages.0.role"),
        ({"messages": []}, 400, "chat template"),
    ],
)
def test_bad_requests_are_explained(app: HandleClient, body: dict[str, object], status: int, message: str) -> None:
    response = httpx.post(f"{app.url}/generate", json=body, headers={"Authorization": f"Bearer {TOKEN}"})
    assert response.status_code == status
    assert message in response.json()["error"]
    with HttpClient(app.url, TOKEN) as client:
        for each in (app, client):
            with pytest.raises(InputError, match=message):
                each.generate(**body)


def test_what_is_no_request_at_all_is_a_client_error(app: HandleClient) -> None:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    broken = httpx.post(f"{app.url}/generate", content=b"{", headers=headers)
    assert (broken.status_code, list(broken.json())) == (422, ["error"])
    for body in (rb'{"text": "\ud800"}', rb'{"messages": [{"role": "user", "content": "a\udfff"}]}'):
        half = httpx.post(f"{app.url}/generate", content=body, headers=headers | {"Content-Type": "application/json"})
        assert half.status_code == 422 and "half of a surrogate pair" in half.json()["error"]
    form = headers | {"Content-Type": "application/x-www-form-urlencoded"}
    bare = httpx.post(f"{app.url}/generate", content=b'{"text": "hi"}', headers=form)
    assert (
        bare.status_code == 422 and "`Content-Type: application/json`, found application/x-www" in bare.json()["error"]
    )
    assert httpx.get(f"{app.url}/nothing", headers=headers).status_code == 404
    assert httpx.get(f"{app.url}/generate", headers=headers).status_code == 405
    for path in ("docs", "openapi.json"):
        assert httpx.get(f"{app.url}/{path}").status_code == 404


def test_a_probe_reports_every_pass(app: HandleClient, http: HttpClient, engine: ReferenceEngine) -> None:
    options = {"steps": 2, "max_new_tokens": 24, "plain_prompts": 2}
    notes: list[tuple[int, int, str]] = []
    report = run_probe(app, PROMPTS, **options, progress=lambda *note: notes.append(note))
    body = {"prompts": [prompt.model_dump() for prompt in PROMPTS], **options}
    headers = {"Authorization": f"Bearer {TOKEN}", "Accept": "application/json"}
    response = httpx.post(f"{app.url}/probe", json=body, headers=headers, timeout=60)
    served = ProbeReport.model_validate(response.json())
    by_http = run_probe(http, PROMPTS, **options)

    passes = []
    for prompt, row in zip(PROMPTS, report.rows, strict=True):
        expected = engine.speculate(prompt.input_ids, 24, 2)
        last = 3 + len(expected.tokens) - 1
        complete = [p for p in expected.passes if p.start + 3 <= last]
        assert (row.id, row.category, row.tokens) == (prompt.id, prompt.category, expected.tokens)
        assert row.starts == [p.start for p in complete]
        assert row.accepted == [p.accepted for p in complete]
        assert row.cut == [p.accepted for p in expected.passes if p not in complete]
        passes += row.accepted
    assert report.acceptance.verify_passes == len(passes)
    assert report.acceptance.acceptance_length == pytest.approx(1 + sum(passes) / len(passes))
    assert set(report.acceptance.by_category) == {"even", "odd"}
    assert report.plain_identical_share == 1 and report.differences == []  # float32
    assert report.speed.prompts == 2
    assert report.speed.break_even == pytest.approx(report.speed.cycle_seconds / report.speed.plain_step_seconds)
    assert report.speedup == pytest.approx(report.acceptance.acceptance_length / report.break_even)
    assert [note[:2] for note in notes] == [(i + 1, 5) for i in range(5)]
    for other in (served, by_http):
        assert other.acceptance == report.acceptance
        assert [row.tokens for row in other.rows] == [row.tokens for row in report.rows]


def test_a_probe_without_complete_passes_says_what_to_change(app: HandleClient) -> None:
    with pytest.raises(InputError, match="max_new_tokens"):
        run_probe(app, PROMPTS, steps=5, max_new_tokens=3, plain_prompts=2)
    body = {"prompts": [{"id": "a", "input_ids": [1]}], "steps": 5, "max_new_tokens": 3}
    headers = {"Authorization": f"Bearer {TOKEN}", "Accept": "application/json"}
    response = httpx.post(f"{app.url}/probe", json=body, headers=headers, timeout=60)
    assert response.status_code == 400
    assert "max_new_tokens" in response.json()["error"]
    with pytest.raises(InputError, match="at least one prompt"):
        run_probe(app, [], steps=2, max_new_tokens=8, plain_prompts=2)


def test_requests_at_once_do_not_disturb_each_other(app: HandleClient, engine: ReferenceEngine) -> None:
    found: dict[int, list[int]] = {}

    def ask(first: int) -> None:
        found[first] = app.generate(input_ids=[first, 9], max_new_tokens=30, steps=3).tokens

    threads = [threading.Thread(target=ask, args=(first,)) for first in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {first: engine.plain([first, 9], 30).tokens for first in range(1, 9)}


def test_a_second_app_shares_the_port_and_leaves_the_first_alone(app: HandleClient, target_folder: Path) -> None:
    config = settings(target_folder, serve={"port": 45999})
    with pytest.raises(ServingError, match="already runs"), deployed(config, random_shape=tiny_shape()):
        pass
    with deployed(config, random_shape=tiny_shape(), app_name="second") as second:
        assert second.url == f"{app.url}/second"
        with HttpClient(second.url) as client:
            assert client.info().drafter == "random"
        pid = second.info().pid
    assert set(serve.status().applications) == {"ray-eagle"}
    assert not exists(pid)
    assert app.health().ok


def test_two_that_start_or_end_serve_do_so_one_after_the_other(cluster: None) -> None:
    inside: list[int] = []
    most = 0

    def claim() -> None:
        nonlocal most
        with claimed():
            inside.append(1)
            most = max(most, len(inside))
            time.sleep(0.1)
            inside.pop()

    threads = [threading.Thread(target=claim) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDS], env={**os.environ, "CLUSTER": head()}, stdout=subprocess.PIPE
    )
    assert holder.stdout and holder.stdout.readline() == b"holds\n"
    holder.kill()  # a driver that dies takes its claim along
    holder.wait()
    with claimed():
        pass


def test_missing_resources_are_named(cluster: None, target_folder: Path) -> None:
    config = settings(target_folder, serve={"gpus": 1}, ray={"wait_s": 0.5})
    with pytest.raises(ServingError, match=r"GPU 1.*GPU 0 of 0"), deployed(config, random_shape=tiny_shape()):
        pass


@pytest.mark.parametrize(
    ("case", "message"),
    [("no target", r"no target: .*missing"), ("wide target", r"hidden_size.*expected 64"), ("late", "within 0.01 s")],
)
def test_a_replica_that_cannot_start_says_why(
    app: HandleClient, target_folder: Path, drafter_folder: Path, tmp_path: Path, case: str, message: str
) -> None:
    config = settings(target_folder)
    if case == "no target":
        config = settings(tmp_path / "missing")
    elif case == "wide target":
        config = settings(tiny_target(tmp_path / "wide", hidden=64))
    else:
        config = settings(target_folder, serve={"start_s": 0.01})
    with (
        pytest.raises(ServingError, match=message) as caught,
        deployed(config, drafter_folder=drafter_folder, app_name="broken"),
    ):
        pass
    assert "Traceback" not in str(caught.value)
    assert set(serve.status().applications) == {"ray-eagle"}


def test_metrics_are_exported(app: HandleClient) -> None:
    app.generate(input_ids=[1, 2], max_new_tokens=20, steps=2)
    url = f"http://127.0.0.1:{ray.nodes()[0]['MetricsExportPort']}/metrics"
    deadline = time.monotonic() + 60
    text = ""
    while time.monotonic() < deadline and "ray_eagle_acceptance_length" not in text:
        time.sleep(0.5)
        text = httpx.get(url).text
    for name in ("ray_eagle_verify_passes", "ray_eagle_acceptance_length"):
        assert name in text


# From here on the module's app is gone: these tests look at an empty cluster.


@pytest.fixture
def empty(cluster: None) -> None:
    serve.shutdown()


def test_nothing_is_left_after_the_body(empty: None, target_folder: Path) -> None:
    with deployed(settings(target_folder), random_shape=tiny_shape()) as app:
        pid = app.info().pid
        assert exists(pid)
        report = run_breakeven(app, PROMPTS[:2], (1, 3), max_new_tokens=12)
    assert_nothing_left(pid)
    with pytest.raises(ServingError, match="cannot be reached"), HttpClient(app.url) as client:
        client.info()
    assert [row.steps for row in report.rows] == [1, 3]
    for row in report.rows:
        assert row.needed == row.speed.break_even > 0
        assert row.can_pay == (row.needed < row.steps + 1)
        assert row.speed.prompts == 2


def test_nothing_is_left_when_the_body_fails(empty: None, target_folder: Path) -> None:
    with (
        pytest.raises(KeyboardInterrupt),
        deployed(settings(target_folder), random_shape=tiny_shape()) as app,
    ):
        pid = app.info().pid
        raise KeyboardInterrupt
    assert_nothing_left(pid)


def test_nothing_is_left_when_the_replica_does_not_start(empty: None, target_folder: Path, tmp_path: Path) -> None:
    with (
        pytest.raises(ServingError, match="no drafter"),
        deployed(settings(target_folder), drafter_folder=tmp_path / "nowhere"),
    ):
        pass
    assert_nothing_left()


def test_a_replica_killed_in_mid_answer_is_a_serving_error(empty: None, tmp_path: Path) -> None:
    target = tiny_target(tmp_path / "long", context=8192)
    with deployed(settings(target), random_shape=tiny_shape()) as app:
        pid = app.info().pid
        killer = threading.Timer(1.0, os.kill, (pid, signal.SIGKILL))
        killer.start()
        with pytest.raises(ServingError, match="replica died"):
            app.generate(input_ids=[1, 2, 3], max_new_tokens=8000, steps=1)
        killer.join()
    assert_nothing_left(pid)
