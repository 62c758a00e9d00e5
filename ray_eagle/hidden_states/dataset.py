"""The commit protocol of a dataset folder: a lock, attempts, and records that make them exist.

An actor writes `unit-N.<attempt>.arrow` to its end and syncs it. The one driver, holding the lock, commits it by creating
`unit-N.json`, the record that names the file. What no record names does not exist: the holder of the lock sweeps it.
"""

import json
import os
import secrets
import socket
import time
from pathlib import Path

from pydantic import ValidationError

from ray_eagle.errors import DatasetError, InputError
from ray_eagle.hidden_states.plan import FORMAT, DatasetPlan
from ray_eagle.hidden_states.shard import UnitRecord, sync
from ray_eagle.run import Folder, content_hash

PLAN = "dataset.json"
LOCK = "lock.json"
SETTLE_S = 2.0


def record_name(unit: int) -> str:
    return f"unit-{unit:05d}.json"


def read_plan(folder: Folder) -> DatasetPlan:
    """Raises DatasetError when there is no dataset, a damaged one, or one of another format."""
    if not folder.exists(PLAN):
        raise DatasetError(f"{folder.path}: expected a dataset with {PLAN}, found none. Run `ray-eagle extract` first.")
    where, way_out = folder.file(PLAN), "Redo it: `ray-eagle extract --redo`."
    stored = folder.read_json(PLAN)
    seal = stored.pop("seal", None)
    if stored.get("format") != FORMAT:
        raise DatasetError(f"{where}: expected format {FORMAT}, found {stored.get('format')}. {way_out}")
    if seal != content_hash(stored):
        raise DatasetError(f"{where} is damaged: its content does not match its seal. {way_out}")
    try:
        return DatasetPlan.model_validate(stored)
    except ValidationError as error:
        raise DatasetError(
            f"{where} is damaged: {error.errors()[0]['loc']}: {error.errors()[0]['msg']}. {way_out}"
        ) from None


def write_plan(folder: Folder, plan: DatasetPlan) -> None:
    """dataset.json, sealed."""
    content = plan.model_dump(mode="json")
    folder.write_json(PLAN, {**content, "seal": content_hash(content)})


def read_records(folder: Folder, plan: DatasetPlan) -> dict[int, UnitRecord]:
    """Records of the committed units of the plan. Raises DatasetError for a damaged record."""
    present = set(folder.names())
    records = {}
    for index in range(len(plan.units)):
        name = record_name(index)
        if name in present:
            try:
                records[index] = parse_record(folder.read_bytes(name))
            except ValueError as error:
                raise DatasetError(
                    f"{folder.file(name)} is damaged ({error}). Run `ray-eagle verify {folder.path} --repair`, then extract."
                ) from None
    return records


def parse_record(data: bytes) -> UnitRecord:
    """Raises ValueError, in a few words, for anything but an intact record."""
    try:
        record = UnitRecord.model_validate_json(data)
    except ValidationError as error:
        raise ValueError(error.errors()[0]["msg"]) from None
    if record.seal != record.expected_seal() or record.model_dump_json().encode() != data:
        raise ValueError("its content does not match its seal")
    return record


def refuse_if_locked(folder: Folder) -> bytes | None:
    """The lock of a driver that died on this host; None without a lock. Raises DatasetError when its holder may be alive."""
    try:
        lock = folder.read_bytes(LOCK)
    except InputError:
        return None
    try:
        holder = json.loads(lock)
    except ValueError:
        holder = {"host": "?", "pid": "?", "started": None}
    if holder["host"] != socket.gethostname() or _process_start(holder["pid"]) == holder["started"]:
        raise DatasetError(
            f"{folder.path} is being written by process {holder['pid']} on {holder['host']}. Wait for it or stop it; if it is "
            f"gone, delete {folder.file(LOCK)}."
        )
    return lock


class DatasetWriter:
    """The one driver of a dataset folder; a context manager that holds the lock.

    Raises DatasetError when another driver holds it, or when the folder holds a dataset of another plan.
    """

    def __init__(self, folder: Folder, plan: DatasetPlan) -> None:
        self.folder = folder
        self.plan = plan

    def __enter__(self) -> "DatasetWriter":
        self.folder.create()
        self._lock()
        try:
            if self.folder.exists(PLAN):
                if read_plan(self.folder) != self.plan:
                    raise DatasetError(
                        f"{self.folder.path} holds a dataset of another plan (other samples, layers or settings). "
                        "Use another run folder, or redo it: `ray-eagle extract --redo`."
                    )
            else:
                write_plan(self.folder, self.plan)
            self.records = read_records(self.folder, self.plan)
            self._sweep()
        except BaseException:
            self._unlock()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._held():
            self._sweep()
        self._unlock()

    def commit(self, record: UnitRecord, *, disturbed: bool = False) -> None:
        """Make an attempt exist. `disturbed`: actors died, so other attempts at the unit may lie around; they are deleted.

        A unit is committed once; raises DatasetError for a second time, for rows that are not the planned ones, and when the
        filesystem takes no more.
        """
        name = self.folder.file(record_name(record.unit))
        made = {row.sample_id for row in record.rows} | {row.sample_id for row in record.quarantined}
        if made != set(self.plan.units[record.unit].samples):
            raise DatasetError(
                f"{name}: unit {record.unit} came back with other samples than planned. Report this bug."
            )
        record.seal = record.expected_seal()
        try:
            created = _create(self.folder, record_name(record.unit), record.model_dump_json().encode())
        except OSError as error:
            raise DatasetError(
                f"{name} cannot be written ({error}). Free some space, or check the filesystem; then run the stage again: "
                "what was committed is kept."
            ) from None
        if not created:
            raise DatasetError(f"{name} exists already: unit {record.unit} was committed twice.")
        self.records[record.unit] = record
        if disturbed:
            self._sweep(f"unit-{record.unit:05d}.")

    def _lock(self) -> None:
        mine = json.dumps(
            {
                "host": socket.gethostname(),
                "pid": os.getpid(),
                "started": _process_start(os.getpid()),
                "nonce": secrets.token_hex(8),
            }
        ).encode()
        self._mine = mine
        for _ in range(2):
            if _create(self.folder, LOCK, mine):
                if not self.folder.is_local:
                    time.sleep(SETTLE_S)  # nothing is created only if absent there: the last to write it has it
                if self._held():
                    return
            if dead := refuse_if_locked(self.folder):
                self._take_away(dead)
        raise DatasetError(f"{self.folder.file(LOCK)}: another driver took the lock. Wait for it.")

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

    def _held(self) -> bool:
        try:
            return self.folder.read_bytes(LOCK) == self._mine
        except InputError:
            return False

    def _unlock(self) -> None:
        if self._held():
            self.folder.delete_file(LOCK)

    def _sweep(self, prefix: str = "") -> None:
        named = {record.file for record in self.records.values()}
        for name in self.folder.names():
            attempt = name.endswith(".arrow") and name not in named and name.startswith(prefix)
            if attempt or (name.endswith(".tmp") and not prefix):
                self.folder.delete_file(name)


def _create(folder: Folder, name: str, data: bytes) -> bool:
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


def _process_start(pid: int) -> str | None:
    """Start time of a process in clock ticks since boot, as text; None when it does not run."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return None
