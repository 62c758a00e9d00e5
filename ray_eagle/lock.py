"""One driver at a time in a folder, on any filesystem."""

import contextlib
import json
import os
import secrets
import socket
import time
from pathlib import Path

from ray_eagle.errors import InputError, LockedError
from ray_eagle.run import Folder, sync
from ray_eagle.serving.supervisor import boot_id, namespace, start_ticks

LOCK = "lock.json"
SETTLE_S = 2.0


class Lock:
    """The file `lock.json` in a folder, held by this process; a context manager. A dead process's lock is taken over.

    Object stores create nothing only if it is absent: there the last of two that write at the same time has it.
    """

    def __init__(self, folder: Folder) -> None:
        self.folder = folder
        process = {"pid": os.getpid(), "started": start_ticks(os.getpid()), "nonce": secrets.token_hex(8)}
        self._mine = json.dumps({**_here(), **process}).encode()

    def __enter__(self) -> "Lock":
        """Raises LockedError when another driver holds it, or may."""
        self.folder.create()
        for _ in range(2):
            if create_once(self.folder, LOCK, self._mine):
                if not self.folder.is_local:
                    time.sleep(SETTLE_S)
                if self.held():
                    return self
            if dead := refuse_if_locked(self.folder):
                self._take_away(dead)
        raise LockedError(f"{self.folder.file(LOCK)}: another driver took the lock. Wait for it.")

    def __exit__(self, *_: object) -> None:
        if self.held():
            self.folder.delete_file(LOCK)

    def held(self) -> bool:
        try:
            return self.folder.read_bytes(LOCK) == self._mine
        except InputError:
            return False

    def _take_away(self, dead: bytes) -> None:
        """Remove the lock of a dead driver, and no other: a third one may have been faster."""
        if not self.folder.is_local:
            self.folder.delete_file(LOCK)
            return
        aside = Path(self.folder.file(f".{LOCK}.{secrets.token_hex(4)}.tmp"))
        try:
            Path(self.folder.file(LOCK)).rename(aside)
        except FileNotFoundError:
            return
        if aside.read_bytes() != dead:
            os.link(aside, self.folder.file(LOCK))
        aside.unlink()


def refuse_if_locked(folder: Folder) -> bytes | None:
    """The lock of a driver that died on this host; None without a lock. Raises LockedError when its holder may be alive."""
    try:
        lock = folder.read_bytes(LOCK)
    except InputError:
        return None
    try:
        holder = json.loads(lock)
    except ValueError:
        holder = {"host": "?", "pid": "?", "started": None}
    here = {name: holder.get(name) for name in _here()} == _here()
    if not here or start_ticks(holder["pid"]) == holder["started"]:
        raise LockedError(
            f"{folder.path} is being written by process {holder['pid']} on {holder['host']}. Wait for it or stop it; if it is "
            f"gone, delete {folder.file(LOCK)}."
        )
    return lock


def create_once(folder: Folder, name: str, data: bytes) -> bool:
    """Create a file with its whole content if it is absent: a hard link locally, one object elsewhere."""
    if not folder.is_local:
        if folder.exists(name):
            return False
        folder.write_bytes(name, data)
        return True
    temporary = f".{name}.{secrets.token_hex(4)}.tmp"
    folder.write_bytes(temporary, data)
    try:
        os.link(folder.file(temporary), folder.file(name))
    except FileExistsError:
        return False
    finally:
        folder.delete_file(temporary)
    sync(Path(folder.path))
    return True


def _here() -> dict[str, str]:
    """Where a process number means something: containers may share a host's name, and a boot gives numbers anew."""
    place = {"host": socket.gethostname(), "processes": "", "boot": ""}
    with contextlib.suppress(OSError):  # without /proc
        place |= {"processes": namespace(), "boot": boot_id()}
    return place
