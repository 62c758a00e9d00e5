"""Processes of a node, read from /proc: whose they are, whether anything still needs them, and how they are ended.

A process of ours carries `OWNED_VARIABLE` in its environment from its launch on, and its children inherit it. (A program
that changes its title overwrites what /proc shows of its environment unless SPT_NOENV is set beside; Ray sets it for
workers and all that they start.) A pid alone names nobody, since pids are reused: a process is known by pid and start time.
"""

import errno
import json
import os
import pwd
import re
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from ray_eagle.serving import supervisor

OWNED_VARIABLE = supervisor.MARK
PROC = Path("/proc")
REAPERS = frozenset(
    {"systemd", "init", "tini", "dumb-init", "docker-init", "catatonit", "containerd-shim", "conmon", "slurmstepd"}
)
"""Names of processes that adopt orphans, besides pid 1."""
POLL_S = 0.05
_DEVICE = re.compile(r"/dev/nvidia(\d+)$")
_UVM = "/dev/nvidia-uvm"

Outcome = Literal["ended", "killed", "gone before", "not permitted", "still there", "refused"]


@dataclass(frozen=True)
class Process:
    """What /proc says of one process."""

    pid: int
    started: int
    """Clock ticks from boot to its start."""
    parent: int
    name: str
    user: str
    command: str
    """Its command line on one line, or [name] where it has none."""
    age_s: float
    owned: str = ""
    """Value of OWNED_VARIABLE; empty when it is not ours."""
    job: str = ""
    """Ray job that started it, in hexadecimal; empty outside Ray."""
    raylet: int = 0
    """Pid of the raylet that started it or a parent of it; 0 outside Ray."""
    devices: tuple[int, ...] = ()
    """Minor numbers N of the open files /dev/nvidiaN."""
    cuda: bool = False
    """It has /dev/nvidia-uvm open, as every process with a CUDA context has (nvidia-smi has not)."""
    readable: bool = True
    """Whether its open files could be listed; those of other users only by root."""


@dataclass(frozen=True)
class RayFacts:
    """What the cluster that was joined says, and what supervisors wrote down, as far as it decides who lives."""

    raylet: int = 0
    """Pid of this node's raylet; 0 when no cluster was joined."""
    live_jobs: frozenset[str] = frozenset()
    replicas: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Mark -> pid and start of the replica that the supervisor recorded for a server."""


@dataclass(frozen=True)
class Standing:
    """Does anybody still need this process?"""

    ours: bool
    stale: bool
    """Ours, and left behind: `preflight --free-gpus` ends it."""
    reason: str


def scan(proc: Path = PROC) -> dict[int, Process]:
    """All processes by pid; zombies count as gone."""
    uptime = float((proc / "uptime").read_text().split()[0])
    found = (read_process(int(entry.name), proc, uptime) for entry in proc.iterdir() if entry.name.isdigit())
    return {process.pid: process for process in found if process}


def read_process(pid: int, proc: Path = PROC, uptime: float | None = None) -> Process | None:
    """One process; None when there is no such pid (any more), or only its zombie."""
    folder = proc / str(pid)
    try:
        head, _, tail = (folder / "stat").read_text(errors="replace").rpartition(")")
        uid = folder.stat().st_uid
        words = (folder / "cmdline").read_bytes().decode(errors="replace").replace("\0", " ").split()
    except OSError:
        return None
    name, fields = head.partition("(")[2], tail.split()
    if fields[0] in "ZX":
        return None
    started = int(fields[19])
    uptime = float((proc / "uptime").read_text().split()[0]) if uptime is None else uptime
    environment = _environment(folder)
    links = _open_files(folder)
    raylet = environment.get("RAY_RAYLET_PID", "")
    return Process(
        pid=pid,
        started=started,
        parent=int(fields[1]),
        name=name,
        user=_user(uid),
        command=" ".join(words) or f"[{name}]",
        age_s=max(0.0, uptime - started / os.sysconf("SC_CLK_TCK")),
        owned=environment.get(OWNED_VARIABLE, ""),
        job=environment.get("RAY_JOB_ID", ""),
        raylet=int(raylet) if raylet.isdigit() else 0,
        devices=tuple(sorted({int(m[1]) for link in links or () if (m := _DEVICE.match(link))})),
        cuda=_UVM in (links or ()),
        readable=links is not None,
    )


def recorded_replicas(temporary: Path) -> dict[str, tuple[int, int]]:
    """Mark -> pid and start of the replica of each server that a supervisor of this user recorded below this folder.

    Only where nobody else can write: a record decides who is ended. Those of other boots or containers count other processes.
    """
    folder = temporary / f"ray_eagle-{os.getuid()}" / "servers"
    if supervisor.fault_of(folder.parent) or supervisor.fault_of(folder):
        return {}
    found = {}
    for path in folder.glob("*.json"):
        try:
            record = json.loads(path.read_text())
            if not supervisor.is_here(record):
                continue
            found[str(record["mark"])] = (int(record["replica"]), int(record["replica_started"]))
        except (OSError, ValueError, KeyError, TypeError):
            continue  # being written
    return found


def ancestors(process: Process, processes: Mapping[int, Process]) -> Iterator[Process]:
    """Parent, its parent, and so on, as far as they can be seen."""
    seen = {process.pid}
    while (parent := processes.get(process.parent)) and parent.pid not in seen:
        yield parent
        seen.add(parent.pid)
        process = parent


def standing(process: Process, processes: Mapping[int, Process], ray: RayFacts) -> Standing:
    """Ours and stale only when nothing that lives accounts for it: no raylet or launcher above it, no job of its own.

    A process of another Ray cluster on this machine counts as alive while its raylet does: its jobs cannot be asked.
    """
    above = list(ancestors(process, processes))
    raylet = next((a for a in above if _is_raylet(a)), None)
    starter = processes.get(process.raylet)
    if starter and not (_is_raylet(starter) and starter.started <= process.started):
        starter = None  # the pid was given to another program since
    if not process.owned:
        if raylet or starter:
            return Standing(False, False, "of a Ray cluster that runs, not started by ray_eagle")
        return Standing(False, False, "not ours")
    if raylet:
        return Standing(True, False, "ours, of a Ray worker that lives")
    if starter and starter.pid != ray.raylet:
        return Standing(True, False, f"ours, of another Ray cluster that runs here (raylet pid {starter.pid})")
    if starter and process.job in ray.live_jobs:
        return Standing(True, False, f"ours, its job {process.job} lives")
    if replica := ray.replicas.get(process.owned):
        owner = processes.get(replica[0])
        if owner and owner.started == replica[1]:
            return Standing(True, False, f"ours, its replica pid {owner.pid} lives")
        return Standing(True, True, "ours, left behind: its replica is gone")
    launcher = next((a for a in above if not a.owned), None)
    if launcher and launcher.pid != 1 and launcher.name not in REAPERS:
        return Standing(True, False, f"ours, its launcher pid {launcher.pid} ({launcher.name}) lives")
    why = "its job ended" if starter else "its Ray cluster is gone" if process.raylet else "its launcher is gone"
    return Standing(True, True, f"ours, left behind: {why}")


def end(
    targets: Sequence[Process], *, term_s: float = 10.0, kill_s: float = 10.0, proc: Path = PROC
) -> dict[int, Outcome]:
    """TERM to all, `term_s` to go, then KILL and `kill_s` more. By pid: what became of each.

    Each is held by a descriptor and compared by its start time before it gets a signal, so that a pid that was given to
    another program in the meantime is left alone. This process and its ancestors are refused.
    """
    processes = scan(proc)
    me = processes.get(os.getpid())
    protected = {os.getpid(), *(a.pid for a in ancestors(me, processes))} if me else {os.getpid()}
    outcomes: dict[int, Outcome] = {}
    held: dict[int, _Held] = {}
    for target in targets:
        if target.pid in protected:
            outcomes[target.pid] = "refused"
            continue
        handle = _Held(target, proc)
        if handle.alive():
            held[target.pid] = handle
        else:
            handle.close()
            outcomes[target.pid] = "gone before"
    try:
        rounds: tuple[tuple[int, float, Outcome], ...] = (
            (signal.SIGTERM, term_s, "ended"),
            (signal.SIGKILL, kill_s, "killed"),
        )
        for number, seconds, outcome in rounds:
            waiting = {pid: handle for pid, handle in held.items() if pid not in outcomes}
            for pid, handle in waiting.items():
                try:
                    handle.send(number)
                except ProcessLookupError:
                    pass  # it went by itself meanwhile
                except PermissionError:
                    outcomes[pid] = "not permitted"
            for pid in _gone(waiting, outcomes, seconds):
                outcomes[pid] = outcome
    finally:
        for handle in held.values():
            handle.close()
    return {target.pid: outcomes.get(target.pid, "still there") for target in targets}


class _Held:
    """One process to end. The descriptor keeps its pid from meaning another; without that system call the start time does."""

    def __init__(self, process: Process, proc: Path) -> None:
        self._process, self._proc = process, proc
        self._descriptor: int | None = None
        try:
            self._descriptor = os.pidfd_open(process.pid)
        except ProcessLookupError:
            pass
        except OSError as error:  # old kernels and some sandboxes
            if error.errno not in (errno.ENOSYS, errno.EPERM, errno.EINVAL):
                raise

    def alive(self) -> bool:
        now = read_process(self._process.pid, self._proc, 0.0)
        return now is not None and now.started == self._process.started

    def send(self, number: int) -> None:
        if self._descriptor is not None:
            signal.pidfd_send_signal(self._descriptor, number)
        elif self.alive():
            os.kill(self._process.pid, number)

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)


def _gone(waiting: Mapping[int, _Held], outcomes: Mapping[int, Outcome], seconds: float) -> list[int]:
    """Those of `waiting` that go within `seconds`."""
    left = {pid: handle for pid, handle in waiting.items() if pid not in outcomes}
    deadline = time.monotonic() + seconds
    gone: list[int] = []
    while left:
        gone += [pid for pid, handle in left.items() if not handle.alive()]
        left = {pid: handle for pid, handle in left.items() if pid not in gone}
        if not left or time.monotonic() > deadline:
            break
        time.sleep(POLL_S)
    return gone


def _environment(folder: Path) -> dict[str, str]:
    """As at its start; empty where it may not be read."""
    try:
        text = (folder / "environ").read_bytes().decode(errors="replace")
    except OSError:
        return {}
    return {key: value for key, found, value in (item.partition("=") for item in text.split("\0")) if found}


def _open_files(folder: Path) -> list[str] | None:
    """Where its descriptors point; None where they may not be listed."""
    links = []
    try:
        for entry in (folder / "fd").iterdir():
            try:
                links.append(str(entry.readlink()))
            except FileNotFoundError:
                continue  # closed meanwhile
    except OSError:
        return None
    return links


def _is_raylet(process: Process) -> bool:
    return process.name == "raylet"


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
