"""Owns a server's processes for a replica, and ends all of them when the replica ends, however it ends.

replica -> supervisor -> server (a session of its own) -> whatever it starts. The replica runs this file as a program and
holds its standard input: the end of that pipe, another parent, or SIGTERM end the server's whole tree (TERM, then KILL).
A guard, in a session of its own, does the same should the supervisor itself be killed. And each server is marked in its
environment and recorded in a file, so that the next start (`end_stale`) finds and ends what outlived even that.

Standard library only, and imported by nothing heavy: it starts in some 30 ms and needs no environment.
"""

import contextlib
import ctypes
import json
import os
import select
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

MARK = "RAY_EAGLE_OWNED"
"""Environment variable that every process of a server carries; its value is the server's id."""
SCRATCH = "RAY_EAGLE_SCRATCH"
"""Environment variable of the supervisor: the replica's folder of files that only its servers read."""
SCRATCH_PREFIX = "ray-eagle-"
KEEP_ENVIRONMENT = "SPT_NOENV"
"""Tells setproctitle (SGLang's processes) to leave the environment readable in /proc."""
GRACE_S = 4.0
"""Seconds between TERM and KILL: within them SGLang drains and leaves by itself, mostly."""
POLL_S = 0.1
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def start_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks since boot, which tells it from a later one of the same pid; None when gone."""
    fields = _stat(pid)
    return int(fields[19]) if fields and fields[0] != "Z" else None


def marked(mark: str, session: int | None = None) -> set[int]:
    """Pids of live processes that carry a mark, or belong to a session."""
    wanted = f"{MARK}={mark}".encode()
    return {pid for pid in _pids() if session_of(pid) == session is not None or wanted in _environment(pid)}


def owned() -> dict[int, str]:
    """Pid -> mark of every live process on this machine that any ray_eagle server started."""
    prefix = f"{MARK}=".encode()
    found = {}
    for pid in _pids():
        value = next((entry for entry in _environment(pid) if entry.startswith(prefix)), None)
        if value is not None:
            found[pid] = value.removeprefix(prefix).decode(errors="replace")
    return found


def session_of(pid: int) -> int | None:
    """The session of a live process; None when it is gone."""
    fields = _stat(pid)
    return int(fields[3]) if fields and fields[0] != "Z" else None


def command_line(pid: int) -> str:
    """Of a live process, words joined by blanks; empty when it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def fault_of(folder: Path) -> str:
    """Why what lies in a folder may be another user's word; empty when only this user can have written there."""
    try:
        found = folder.lstat()
    except OSError as error:
        return f"{folder} cannot be looked at ({error.strerror})"
    if not stat.S_ISDIR(found.st_mode):
        return f"{folder} is not a folder"
    if found.st_uid != os.getuid():
        return f"{folder} belongs to user {found.st_uid}"
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"{folder} can be written by others (mode {stat.S_IMODE(found.st_mode):o})"
    return ""


def is_here(record: dict[str, Any]) -> bool:
    """Whether a record's process numbers are of this boot and these process numbers. Raises KeyError."""
    return bool(record["boot"] == boot_id() and record["processes"] == namespace())


def boot_id() -> str:
    """Another one after every start of the machine, when process numbers and their start times begin anew."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def end_processes(
    find: Callable[[], set[int]], first: int | None, grace_s: float, limit_s: float = 20, *, reap: bool = False
) -> set[int]:
    """TERM to the process `first`, KILL for all that `find` returns after `grace_s`; what is left after `limit_s`.

    `find` is asked again and again, since a tree may grow while it dies. `reap`: wait for any child that ended; only for a
    process whose children are all of that tree, since it takes exit codes away from whoever else waits.
    """
    began = time.monotonic()
    if first is not None:
        _signal(first, signal.SIGTERM)
    while left := find():
        waited = time.monotonic() - began
        if waited > limit_s:
            return left
        # without its root a tree has nothing to drain
        if first is None or waited > grace_s or first not in left:
            for pid in left:
                _signal(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while reap and os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(POLL_S / 2)
    return set()


def end_stale(folder: Path) -> list[str]:
    """End the servers recorded in a folder whose replica is gone, and forget them and their scratch files. Marks of those
    that had to be ended.

    A process is ended only when /proc says that it is ours: by its mark, or by the session of the recorded server while
    that server, its leader, lives. Records of an earlier boot say nothing any more. Raises OSError when a process cannot
    be ended.
    """
    ended = []
    for path in sorted(folder.glob("*.json")):
        try:
            record = json.loads(path.read_text())
            if record["boot"] != boot_id():
                path.unlink(missing_ok=True)
                continue
            if not is_here(record):
                continue  # of a container that shares this folder, but not its processes
            mark, replica = record["mark"], record["replica"]
            session, started = record["server"], record["server_started"]
            owner_lives = start_ticks(replica) == record["replica_started"]
        except (OSError, ValueError, KeyError, TypeError):
            continue  # half written by a process that is starting now, or not a record
        if owner_lives:
            continue
        # without its leader a session of that number may be anybody's
        ours = session if started is not None and start_ticks(session) == started else None
        if marked(mark, ours):
            left = end_processes(lambda mark=mark, ours=ours: marked(mark, ours), None, 0)  # type: ignore[misc]
            if left:
                raise OSError(f"processes {sorted(left)} of the server {mark} cannot be ended")
            ended.append(mark)
        remove_scratch(record.get("scratch"))
        path.unlink(missing_ok=True)
    return ended


def remove_scratch(name: str | None) -> None:
    """Remove a replica's scratch folder, if it is one: named as such, in the temporary folder, and this user's alone."""
    if not name:
        return
    folder = Path(name)
    named = folder.parent == Path(tempfile.gettempdir()) and folder.name.startswith(SCRATCH_PREFIX)
    if named and not fault_of(folder):
        shutil.rmtree(folder, ignore_errors=True)


def namespace() -> str:
    """Which set of process numbers these are."""
    return str(Path("/proc/self/ns/pid").readlink())


def _pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the state on; empty when the process is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _environment(pid: int) -> list[bytes]:
    if _stat(pid)[:1] in ([], ["Z"]):
        return []
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # another user's, or gone
        return []


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _die_with_parent() -> None:
    """In the new server: SIGKILL when the supervisor dies. It has one thread, so the signal follows the process."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _start_guard(mark: str, supervisor: int) -> tuple[int, int]:
    """Fork the guard; its pid and the pipe end that holds it off. It ends the tree when that closes without a farewell."""
    read, write = os.pipe()
    if guard := os.fork():
        os.close(read)
        return guard, write
    os.setsid()
    os.close(write)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    for descriptor in (0, 1):
        os.close(descriptor)
    try:
        if not os.read(read, 1):
            me = {os.getpid(), supervisor}
            end_processes(lambda: marked(mark) - me, None, 0)
    finally:
        os._exit(0)


def supervise(mark: str, record: Path, log: Path, command: list[str]) -> int:
    """Run the command until it ends or the replica does; its exit code. Says `started PID`, `exited CODE` on stdout."""
    replica, me = os.getppid(), os.getpid()
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)  # orphans of the server come back here
    stopping: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: stopping.append(number))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the replica decides
    guard, holds_off = _start_guard(mark, me)
    with log.open("ab") as output:
        server = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )
    written = {
        "mark": mark,
        "boot": boot_id(),
        "processes": namespace(),
        "replica": replica,
        "replica_started": start_ticks(replica),
        "supervisor": me,
        "server": server.pid,
        "server_started": start_ticks(server.pid),
        "log": str(log),
        "scratch": os.environ.get(SCRATCH),
    }
    temporary = record.with_suffix(".tmp")
    temporary.write_text(json.dumps(written))
    temporary.replace(record)
    _say(f"started {server.pid}")
    while server.poll() is None and not stopping and os.getppid() == replica:
        readable, _, _ = select.select([0], [], [], POLL_S)
        if readable and not os.read(0, 64):
            break
    if server.poll() is not None:
        _say(f"exited {server.returncode}")
    mine = {me, guard}
    first = server.pid if server.poll() is None else None
    left = end_processes(lambda: marked(mark, server.pid) - mine, first, GRACE_S, reap=True)
    if not left:
        os.write(holds_off, b"x")
        record.unlink(missing_ok=True)
        if os.getppid() != replica:  # or it removes them itself
            remove_scratch(os.environ.get(SCRATCH))
    return server.returncode or 0


def _say(line: str) -> None:
    with contextlib.suppress(OSError):  # the replica may be gone
        os.write(1, f"{line}\n".encode())


if __name__ == "__main__":
    supervise(os.environ[MARK], Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
