"""The commit protocol of a dataset folder: a lock, attempts, and records that make them exist.

An actor writes `unit-N.<attempt>.arrow` to its end and syncs it. The one driver, holding the lock, commits it by creating
`unit-N.json`, the record that names the file. What no record names does not exist: the holder of the lock sweeps it.
"""

import hashlib
import json
import os
import secrets
import socket
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
from pydantic import BaseModel, ConfigDict, ValidationError

from ray_eagle.errors import DatasetError
from ray_eagle.hidden_states.plan import DatasetPlan, Unit
from ray_eagle.hidden_states.schema import Sample, encode, schema
from ray_eagle.run import Folder, content_hash

PLAN = "dataset.json"
LOCK = "lock.json"


class UnitRecord(BaseModel):
    """What a committed unit holds, and where it was made."""

    model_config = ConfigDict(extra="forbid")

    unit: int
    file: str
    rows: int
    tokens: int
    supervised_tokens: int
    """Tokens that the assistant wrote and a position predicts."""
    bytes: int
    checksum: str
    """BLAKE2 of the whole file; each row carries one of its own."""
    token_ids: list[int]
    """Supervised tokens that occur, ascending,"""
    token_counts: list[int]
    """and how often each does."""
    made_by: dict[str, Any]
    seal: str = ""
    """Hash of all of the above, set on commit: a damaged record is told from an intact one."""

    def expected_seal(self) -> str:
        return content_hash(self.model_dump(mode="json", exclude={"seal"}))


def record_name(unit: int) -> str:
    return f"unit-{unit:05d}.json"


def read_plan(folder: Folder) -> DatasetPlan:
    """Raises DatasetError when there is no dataset, or one of another format."""
    if not folder.exists(PLAN):
        raise DatasetError(f"{folder.path}: expected a dataset with {PLAN}, found none. Run `ray-eagle extract` first.")
    try:
        return DatasetPlan.model_validate(folder.read_json(PLAN))
    except ValidationError as error:
        raise DatasetError(
            f"{folder.file(PLAN)} is damaged: {error.errors()[0]['loc']}: {error.errors()[0]['msg']}."
        ) from None


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
    if record.seal != record.expected_seal():
        raise ValueError("its content does not match its seal")
    return record


def write_shard(
    folder: Folder, unit: Unit, samples: Iterable[Sample], hidden_size: int, state_dtype: str
) -> UnitRecord:
    """Write one attempt at a unit to its end, sync it, and return the record that would commit it."""
    kind = schema(hidden_size, state_dtype)
    name = f"unit-{unit.index:05d}.{secrets.token_hex(4)}.arrow"
    rows = tokens = 0
    counts: Counter[int] = Counter()
    with folder.fs.open_output_stream(folder.file(name)) as stream:
        hashing = _HashingStream(stream)
        with pa.ipc.new_file(pa.PythonFile(hashing, "w"), kind) as writer:
            for sample in samples:
                writer.write_batch(encode(sample, kind))
                rows, tokens = rows + 1, tokens + len(sample.input_ids)
                counts.update(sample.input_ids[1:][sample.loss_mask[1:].bool()].tolist())
    if folder.is_local:
        _sync(Path(folder.file(name)))
    ids = sorted(counts)
    return UnitRecord(
        unit=unit.index,
        file=name,
        rows=rows,
        tokens=tokens,
        supervised_tokens=counts.total(),
        bytes=hashing.size,
        checksum=hashing.digest.hexdigest(),
        token_ids=ids,
        token_counts=[counts[i] for i in ids],
        made_by={"host": socket.gethostname(), "pid": os.getpid()},
    )


def refuse_if_locked(folder: Folder) -> None:
    """Raises DatasetError when a driver that may be alive holds the lock; a dead one on this host does not count."""
    if not folder.exists(LOCK):
        return
    holder = folder.read_json(LOCK)
    if holder["host"] != socket.gethostname() or _process_start(holder["pid"]) == holder["started"]:
        raise DatasetError(
            f"{folder.path} is being written by process {holder['pid']} on {holder['host']}. Wait for it or stop it; if it is "
            f"gone, delete {folder.file(LOCK)}."
        )


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
                self.folder.write_json(PLAN, self.plan.model_dump())
            self.records = read_records(self.folder, self.plan)
            self._sweep()
        except BaseException:
            self.folder.delete_file(LOCK)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.folder.delete_file(LOCK)

    def commit(self, record: UnitRecord) -> None:
        """Make an attempt exist. A unit is committed once; raises DatasetError for a second time."""
        record.seal = record.expected_seal()
        text = record.model_dump_json(indent=1).encode()
        if not _create(self.folder, record_name(record.unit), text):
            raise DatasetError(
                f"{self.folder.file(record_name(record.unit))} exists already: unit {record.unit} was committed twice."
            )
        self.records[record.unit] = record

    def _lock(self) -> None:
        mine = {"host": socket.gethostname(), "pid": os.getpid(), "started": _process_start(os.getpid())}
        for _ in range(2):
            if _create(self.folder, LOCK, json.dumps(mine).encode()):
                return
            refuse_if_locked(self.folder)
            self.folder.delete_file(LOCK)
        raise DatasetError(f"{self.folder.file(LOCK)}: another driver took the lock. Wait for it.")

    def _sweep(self) -> None:
        named = {record.file for record in self.records.values()}
        for name in self.folder.names():
            if (name.endswith(".arrow") and name not in named) or name.endswith(".tmp"):
                self.folder.delete_file(name)


class _HashingStream:
    """Passes bytes on and keeps their hash and number."""

    closed = False

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self.digest = hashlib.blake2b(digest_size=16)
        self.size = 0

    def write(self, data: Any) -> int:
        self.digest.update(data)
        self.size += memoryview(data).nbytes
        self.stream.write(data)
        return memoryview(data).nbytes

    def flush(self) -> None: ...

    def close(self) -> None:
        self.closed = True


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
    _sync(Path(folder.path))
    return True


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _process_start(pid: int) -> str | None:
    """Start time of a process in clock ticks since boot, as text; None when it does not run."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return None
