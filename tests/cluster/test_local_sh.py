"""cluster/local.sh with real heads: jobs run, and stop ends everything that start brought about and nothing else."""

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "cluster" / "local.sh"
RAY = Path(sys.prefix) / "bin" / "ray"

# A job that leaves a process behind: it ignores SIGTERM, has a session of its own and init for a parent.
DAEMON = """
import os, signal, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        with open(sys.argv[1], "w") as file:
            file.write(str(os.getpid()))
        time.sleep(600)
    os._exit(0)
os.wait()
while not os.path.exists(sys.argv[1]) or not open(sys.argv[1]).read():
    time.sleep(0.05)
print(41 + 1)
"""


@dataclass
class Head:
    port: int
    dashboard: int

    @property
    def folder(self) -> Path:
        return Path(f"/tmp/ray-eagle-{os.getuid()}-{self.port}")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.dashboard}"

    def run(self, verb: str, **env: str) -> subprocess.CompletedProcess[str]:
        settings = {
            "RAY_EAGLE_PORT": str(self.port),
            "RAY_EAGLE_DASHBOARD_PORT": str(self.dashboard),
            "RAY_EAGLE_VENV": sys.prefix,
            "RAY_ADDRESS": "10.255.255.1:6379",  # a user's other cluster: must not matter
            "http_proxy": "http://127.0.0.1:9",
            **env,
        }
        return subprocess.run(
            ["bash", SCRIPT, verb], env={**os.environ, **settings}, capture_output=True, text=True, timeout=200
        )

    def job(self, *command: str) -> subprocess.CompletedProcess[str]:
        words = [RAY, "job", "submit", "--address", self.url, "--", *command]
        env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
        return subprocess.run(words, env=env, capture_output=True, text=True, timeout=120)

    def pid(self) -> int:
        return int((self.folder / "head.pid").read_text().split()[0])


@pytest.fixture
def heads() -> Iterator[list[Head]]:
    """Two heads that were not started yet, on free ports; whatever a test left of them is ended."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(4)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    both = [Head(ports[0], ports[1]), Head(ports[2], ports[3])]
    yield both
    for head in both:
        assert head.run("stop").returncode == 0
        shutil.rmtree(head.folder, ignore_errors=True)


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def tree(root: int) -> set[int]:
    """A process and its descendants, by the slow obvious way: ask every process for its ancestors."""

    def parent(pid: int) -> int:
        try:
            return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            return 0

    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            pid = int(entry.name)
            while pid > 1 and pid != root:
                pid = parent(pid)
            if pid == root:
                found.add(int(entry.name))
    return found


def listening(pids: set[int]) -> set[str]:
    """Local addresses (hex, as in /proc/net/tcp*) on which any of the processes listens."""
    inodes = set()
    for pid in pids:
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            try:
                inodes.add(str(fd.readlink()).removeprefix("socket:[").removesuffix("]"))
            except FileNotFoundError:
                continue
    rows = [row.split() for table in ("tcp", "tcp6") for row in Path(f"/proc/net/{table}").read_text().splitlines()[1:]]
    return {row[1].partition(":")[0] for row in rows if row[3] == "0A" and row[9] in inodes}


def is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_head_runs_jobs_and_stop_leaves_nothing_but_the_other_head(heads: list[Head], tmp_path: Path) -> None:
    first, second = heads
    pool = ThreadPoolExecutor(2)
    for head, done in zip(heads, pool.map(lambda head: head.run("start"), heads), strict=True):
        assert done.returncode == 0, done.stderr
        assert head.url in done.stdout
        assert "ray job submit" in done.stdout

    again = first.run("start")
    assert (again.returncode, again.stdout.splitlines()[0]) == (0, "Already running.")
    assert first.run("status").returncode == 0

    good = [sys.executable, "-c", DAEMON, str(tmp_path / "pid")]
    bad = ["python", "-c", "raise SystemExit(3)"]
    job, failed = pool.map(lambda words: first.job(*words), [good, bad])
    assert job.returncode == 0, job.stderr
    assert "42" in job.stdout.splitlines()
    assert failed.returncode != 0
    assert "failed" in failed.stdout

    daemon = int((tmp_path / "pid").read_text())
    members = tree(first.pid())
    assert len(members) > 5
    assert daemon not in members
    assert alive(daemon)
    loopback = {"0100007F", "0000000000000000FFFF00000100007F"}
    assert listening(members) <= loopback
    others = tree(second.pid())

    done = first.run("stop")
    assert done.returncode == 0, done.stderr
    assert [pid for pid in {*members, daemon} if alive(pid)] == []
    assert not is_open(first.port)
    assert not is_open(first.dashboard)
    assert first.run("status").returncode == 1
    assert first.run("stop").returncode == 0

    assert second.run("status").returncode == 0
    assert [pid for pid in others if not alive(pid)] == []
    job = second.job("python", "-c", "import sys; print(sys.executable)")
    assert job.returncode == 0
    assert str(Path(sys.prefix) / "bin" / "python") in job.stdout


def test_head_that_was_killed_is_cleaned_up_by_stop(heads: list[Head]) -> None:
    head = heads[0]
    assert head.run("start").returncode == 0
    members = tree(head.pid())
    killed = head.pid()
    os.kill(killed, 9)
    deadline = time.monotonic() + 60
    while alive(killed) and time.monotonic() < deadline:  # it lets go of its memory first
        time.sleep(0.05)
    assert head.run("status").returncode == 1
    assert head.run("stop").returncode == 0
    assert [pid for pid in members if alive(pid)] == []


def test_start_that_cannot_succeed_says_why_and_leaves_nothing(heads: list[Head], tmp_path: Path) -> None:
    head = heads[0]
    with socket.create_server(("127.0.0.1", head.dashboard)):
        done = head.run("start")
    assert done.returncode == 1
    assert f"port {head.dashboard} is taken" in done.stderr

    done = head.run("start", RAY_EAGLE_VENV=str(tmp_path))
    assert done.returncode == 1
    assert "RAY_EAGLE_VENV" in done.stderr

    # A `ray` that starts and never answers.
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "ray").write_text(f"#!/bin/sh\necho started; echo $$ > {tmp_path}/pid; sleep 600\n")
    (tmp_path / "bin" / "ray").chmod(0o755)
    begin = time.monotonic()
    done = head.run("start", RAY_EAGLE_VENV=str(tmp_path), RAY_EAGLE_START_S="2")
    assert done.returncode == 1
    assert "no answer from the job API within 2 s" in done.stderr
    assert "started" in done.stderr
    assert time.monotonic() - begin < 20
    assert not alive(int((tmp_path / "pid").read_text()))
    assert head.run("status").returncode == 1


@pytest.mark.parametrize(("words", "code"), [(["--help"], 0), ([], 2), (["restart"], 2)])
def test_usage(words: list[str], code: int) -> None:
    done = subprocess.run(["bash", SCRIPT, *words], capture_output=True, text=True)
    assert done.returncode == code
    assert "start|stop|status" in done.stdout + done.stderr
