"""Whatever ends, the GPU is free again: python3 -m tests.gpu.kill -c tests/gpu/path.yaml [SETTINGS]   (after `. /tmp/gpu/env.sh`)

Starts the real server under a random drafter five times and ends it in five ways: kill -9 of the server's scheduler, of the
replica, and of the worker's parent (the raylet); `serve delete`; Ctrl-C of the job. Prints a line each: seconds until every
process of that server is gone, and until the GPU's memory is back to idle. Exit code 1 when one takes over 20 s. About 5
minutes on one H200.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import ray
from ray import serve

from ray_eagle.cluster import connect
from ray_eagle.drafter.start import new_shape
from ray_eagle.errors import ServingError
from ray_eagle.serving.app import deployed
from ray_eagle.serving.supervisor import owned
from ray_eagle.settings import load_config
from ray_eagle.target.loading import read_facts

LIMIT_S = 20.0
START_S = 200.0
IDLE_MIB = 100
"""nvidia-smi counts a little late, and rounds."""


def gpu_mib() -> int:
    """Used memory of the first GPU; 0 without one (a rehearsal)."""
    try:
        words = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        return int(subprocess.run(words, capture_output=True, text=True).stdout.split()[0])
    except (OSError, IndexError, ValueError):
        return 0


def command_line(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    return ""


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def launcher() -> int | None:
    """The server's first process, once it answers."""
    for pid in owned():
        found = re.search(r"sglang\.launch_server.*--port (\d+)", command_line(pid))
        if found and "supervisor.py" not in command_line(pid):
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"http://127.0.0.1:{found.group(1)}/health", timeout=5).status_code == 200:
                    return pid
    return None


def wait(what: Callable[[], Any], seconds: float) -> Any:
    """The first true value within so many seconds; None without one."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if value := what():
            return value
        time.sleep(0.1)
    return None


def measure(name: str, idle: int, end: Callable[[], Any]) -> bool:
    """End the server in one way; print how long its processes and memory stay."""
    before, used = set(owned()), gpu_mib()
    began = time.monotonic()
    end()
    gone = free = None
    while time.monotonic() - began < LIMIT_S and (gone is None or free is None):
        if gone is None and not before & set(owned()):
            gone = time.monotonic() - began
        if free is None and gpu_mib() <= idle + IDLE_MIB:
            free = time.monotonic() - began
        time.sleep(0.1)
    good = gone is not None and free is not None
    left = {pid: command_line(pid)[:80] for pid in before & set(owned())}
    shown = [f"{value:.1f} s" if value is not None else f"more than {LIMIT_S:g} s" for value in (gone, free)]
    print(
        f"{name}: {len(before)} processes, {used} MiB; processes gone in {shown[0]}, memory back in {shown[1]}"
        f"{'' if good else f'; LEFT {left}, {gpu_mib()} MiB, idle {idle}'}",
        flush=True,
    )
    return good


def in_an_app(words: list[str], idle: int, killed: Sequence[str] = ("scheduler", "replica")) -> list[bool]:
    """Those that are killed (Serve starts another after each), and `serve delete`."""
    config = (
        load_config(None, None, words).config if words[0] != "-c" else load_config(words[1], None, words[2:]).config
    )
    shape = new_shape(config.drafter, read_facts(config.target), config.vocab.size)
    connect(config.ray)
    results = []
    with deployed(config, random_shape=shape) as app:

        def replaced(server: str) -> Callable[[], bool]:
            def other() -> bool:
                try:
                    return app.engine().server != server
                except ServingError:
                    return False

            return other

        for name in killed:
            server = app.engine().server
            schedulers = [pid for pid in owned() if command_line(pid).startswith("sglang::scheduler")]
            victim = app.info().pid if name == "replica" else (schedulers or [launcher()])[0]
            results.append(measure(f"kill -9 {name}", idle, lambda victim=victim: os.kill(victim, signal.SIGKILL)))
            began = time.monotonic()
            if not wait(replaced(server), START_S):
                print(f"no new replica {START_S:g} s after kill -9 {name}", flush=True)
                return [*results, False]
            print(f"  Serve's next replica answered {time.monotonic() - began:.0f} s later", flush=True)
        results.append(measure("serve delete", idle, lambda: serve.delete("ray-eagle")))
    serve.shutdown()
    ray.shutdown()
    return results


def in_a_job(words: list[str], idle: int) -> list[bool]:
    """Ctrl-C of a whole `ray-eagle breakeven`, and kill -9 of its raylet."""
    results = []
    for name in ("Ctrl-C of the job", "kill -9 the worker's parent"):
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder) / "log"
            program = [sys.executable, "-m", "ray_eagle", "breakeven", *words, "--run", f"{folder}/run"]
            with log.open("w") as stream:
                job = subprocess.Popen(program, stdout=stream, stderr=stream, start_new_session=True)
            try:
                pid = wait(launcher, START_S)
                if pid is None:
                    print(f"{name}: no server within {START_S:g} s: {log.read_text()[-1500:]}", flush=True)
                    results.append(False)
                elif name.startswith("Ctrl-C"):
                    results.append(measure(name, idle, lambda job=job: os.killpg(job.pid, signal.SIGINT)))
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        job.wait(LIMIT_S)
                    print(f"  the job's exit code: {job.returncode}", flush=True)
                else:
                    raylet = parent(parent(parent(pid)))  # server, supervisor, worker
                    print(f"  {command_line(raylet).split()[0]}", flush=True)
                    results.append(measure(name, idle, lambda raylet=raylet: os.kill(raylet, signal.SIGKILL)))
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(job.pid, signal.SIGKILL)
                job.wait()
    return results


if __name__ == "__main__":
    arguments = sys.argv[1:] or ["-c", "tests/gpu/path.yaml"]
    resting = gpu_mib()
    print(f"idle: {resting} MiB, ours: {owned()}", flush=True)
    outcome = in_a_job(arguments, resting) + in_an_app(arguments, resting)
    print(f"{sum(outcome)} of 5 good; left behind: {owned()}, {gpu_mib()} MiB", flush=True)
    sys.exit(outcome != [True] * 5)
