"""Real processes as preflight meets them, and fake /proc trees."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ray_eagle.preflight.processes import OWNED_VARIABLE, Process, read_process

WAIT = "import time; print('up', flush=True); time.sleep(600)"
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN);" + WAIT
# a child in its own session whose parent is gone: what a killed replica leaves behind
ORPHAN = "import os, subprocess, sys; print(subprocess.Popen([sys.executable, '-c', sys.argv[1]], start_new_session=True).pid)"

Start = Callable[..., Process]


def fake(
    root: Path, pid: int, *, parent: int = 1, started: int = 100, name: str = "python", **environment: str
) -> None:
    """A process in a tree that looks like /proc."""
    folder = root / str(pid)
    (folder / "fd").mkdir(parents=True)
    fields = ["S", str(parent), *["0"] * 17, str(started), "0", "0"]
    (folder / "stat").write_text(f"{pid} ({name}) {' '.join(fields)}\n")
    (folder / "cmdline").write_bytes(f"{name}\0-m\0work\0".encode())
    (folder / "environ").write_bytes("".join(f"{k}={v}\0" for k, v in environment.items()).encode())
    (root / "uptime").write_text("1000.00 1.0\n")


@contextmanager
def starting() -> Iterator[Start]:
    """Start programs with a mark (or none), orphaned or as children of the tests; all are killed at the end."""
    pids: list[int] = []

    def begin(program: str = WAIT, *, mark: str = "tests", orphan: bool = False, **environment: str) -> Process:
        variables = {**os.environ, **environment} | ({OWNED_VARIABLE: mark} if mark else {})
        words = [sys.executable, "-c", ORPHAN, program] if orphan else [sys.executable, "-c", program]
        child = subprocess.Popen(words, env=variables, stdout=subprocess.PIPE, text=True)
        assert child.stdout
        line = child.stdout.readline()
        pid = int(line) if orphan else child.pid
        pids.append(pid)
        if orphan:
            child.wait()
            child.stdout.readline()
        process = read_process(pid)
        assert process
        return process

    yield begin
    for pid in pids:
        if process := read_process(pid):
            os.kill(process.pid, signal.SIGKILL)
