"""A server in a child process, under the supervisor that ends it with us: start, watch, explain, stop."""

import contextlib
import os
import re
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import httpx

from ray_eagle.errors import ServingError
from ray_eagle.serving import supervisor

KEPT_LOGS = 20
TAIL_LINES = 15
POLL_S = 0.25
HEALTH_S = 10.0
"""A server that does not answer within this may be busy; `hang_s` decides when it hangs."""
HEALTH_EVERY_S = 10.0
"""An idle server is asked this often, since each question costs it a token."""
STOP_S = supervisor.GRACE_S + 25


def state_folder() -> Path:
    """Where this user's servers are recorded and log, on this machine.

    Records say which processes to end, so nobody else may have written them. Raises ServingError when somebody could.
    """
    parent = Path(tempfile.gettempdir()) / f"ray_eagle-{os.getuid()}"
    folder = parent / "servers"
    for each in (parent, folder):
        with contextlib.suppress(OSError):
            each.mkdir(mode=0o700)
        if fault := supervisor.fault_of(each):
            raise ServingError(
                f"server: expected {parent} to be a folder that only this user writes, found that {fault}. Remove it, or set "
                "TMPDIR to a folder of your own where the replica starts."
            )
    return folder


def free_port(host: str = "127.0.0.1") -> int:
    """A port of that address that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


class Child:
    """One running server. Not restarted: a new one is a new Child."""

    def __init__(
        self,
        name: str,
        command: list[str],
        environment: Mapping[str, str],
        port: int,
        essential: str = "",
        scratch: str = "",
    ) -> None:
        """Starts the process at once; `await_healthy` waits for it. Ends what earlier replicas left on this machine.

        `essential`: pattern of the command lines of processes that it cannot live without. `scratch`: a folder to remove
        should this process be gone when the server ends. Raises ServingError when the command cannot be run, or something
        of an earlier server cannot be ended.
        """
        folder = state_folder()
        try:
            supervisor.end_stale(folder)
        except OSError as error:
            raise ServingError(
                f"{name}: an earlier server is in the way: {error}. End them, then start again."
            ) from None
        self.name, self.port = name, port
        self._essential = re.compile(essential) if essential else None
        self._members: dict[int, tuple[str, int | None]] = {}
        self.url = f"http://127.0.0.1:{port}"
        self.mark = f"{name}-{secrets.token_hex(6)}"
        self.log = folder / f"{self.mark}.log"
        self._record = folder / f"{self.mark}.json"
        self._forget_old_logs(folder)
        self.log.write_text(f"$ {' '.join(command)}\n")
        self.pid = 0
        marks = {supervisor.MARK: self.mark, supervisor.KEEP_ENVIRONMENT: "1", supervisor.SCRATCH: scratch}
        words = [sys.executable, "-E", "-s", "-S", str(Path(supervisor.__file__).absolute())]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [*words, str(self._record), str(self.log), *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**environment, **marks},
            )
        assert self._process.stdout is not None
        word, _, pid = self._process.stdout.readline().decode().strip().partition(" ")
        if word != "started":
            self.stop()
            raise ServingError(f"{name}: the server cannot be run: {command[0]}.{self.tail()}")
        self.pid = int(pid)
        self.last_sign = time.monotonic()

    @property
    def alive(self) -> bool:
        """The supervisor outlives its server by the moment it takes to end the rest of the tree."""
        return self._process.poll() is None and supervisor.start_ticks(self.pid) is not None

    def await_healthy(self, start_s: float, hang_s: float) -> None:
        """Until /health says 200. Raises ServingError, and stops the server, when it dies, takes too long, or falls silent."""
        deadline = time.monotonic() + start_s
        size = -1
        while True:
            if not self.alive:
                self._fail("ended before it was healthy")
            if self.healthy():
                self._members = self._find_members()
                return
            now = time.monotonic()
            if self.log.stat().st_size != size:
                size, self.last_sign = self.log.stat().st_size, now
            if now > deadline:
                self._fail(f"was not healthy within {start_s:g} s; raise serve.start_s if loading takes longer")
            if now - self.last_sign > hang_s:
                self._fail(f"hangs: neither healthy nor a line in its log for {hang_s:g} s (serve.hang_s)")
            time.sleep(POLL_S)

    def healthy(self) -> bool:
        """Whether /health says 200 now."""
        try:
            good = httpx.get(f"{self.url}/health", timeout=HEALTH_S).status_code == 200
        except httpx.HTTPError:
            return False
        if good:
            self.last_sign = time.monotonic()
        return good

    def check(self, hang_s: float, *, busy: bool) -> None:
        """Raises ServingError when it, or a process that it needs, is dead, or it is idle and without an answer for
        `hang_s`."""
        if not self.alive:
            raise ServingError(f"{self.name}: the server died{self._code()}.{self.tail()}")
        for pid, (title, ticks) in self._members.items():
            if supervisor.start_ticks(pid) != ticks:
                raise ServingError(f"{self.name}: the server's process {title} ({pid}) died.{self.tail()}")
        if busy:
            self.last_sign = time.monotonic()  # requests have deadlines of their own
        elif time.monotonic() - self.last_sign < HEALTH_EVERY_S:
            return
        elif not self.healthy() and time.monotonic() - self.last_sign > hang_s:
            raise ServingError(
                f"{self.name}: the server hangs: no answer for {hang_s:g} s (serve.hang_s).{self.tail()}"
            )

    def tail(self) -> str:
        """The last lines of its log, each on a line of its own, and where the rest is."""
        with contextlib.suppress(OSError):
            lines = [line.rstrip()[-300:] for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
            shown = "".join(f"\n    {line}" for line in lines[-TAIL_LINES:])
            return f" The end of its log, {self.log}:{shown}"
        return ""

    def stop(self) -> None:
        """End the server and everything that it started. Raises ServingError if some of it stays."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()  # its guard does the rest
            self._process.wait()
        left = supervisor.end_processes(lambda: supervisor.marked(self.mark), None, 0)
        if left:
            raise ServingError(f"{self.name}: processes {sorted(left)} cannot be ended. End them: kill -9.")
        self._record.unlink(missing_ok=True)

    def _find_members(self) -> dict[int, tuple[str, int | None]]:
        if self._essential is None:
            return {}
        titles = {pid: supervisor.command_line(pid) for pid in supervisor.marked(self.mark, self.pid)}
        return {pid: (t, supervisor.start_ticks(pid)) for pid, t in titles.items() if self._essential.match(t)}

    def _fail(self, what: str) -> None:
        code = self._code()
        tail = self.tail()
        self.stop()
        raise ServingError(f"{self.name}: the server {what}{code}.{tail}")

    def _code(self) -> str:
        """Its exit code, where the supervisor had the time to tell."""
        if self._process.poll() is None or self._process.stdout is None:
            return ""
        words = self._process.stdout.read().decode().split()
        return f" (exit code {words[-1]})" if "exited" in words else ""

    def _forget_old_logs(self, folder: Path) -> None:
        logs = sorted(folder.glob("*.log"), key=lambda path: path.stat().st_mtime)
        for path in logs[:-KEPT_LOGS]:
            if not path.with_suffix(".json").exists():  # a server that runs is still writing it
                path.unlink(missing_ok=True)
