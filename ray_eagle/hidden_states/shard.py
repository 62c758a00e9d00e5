"""Write one shard: an Arrow file whose every byte is covered by a checksum that belongs to a row, or to the frame around them."""

import os
import secrets
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash
from pydantic import BaseModel, ConfigDict

from ray_eagle.errors import DatasetError
from ray_eagle.hidden_states.plan import Quarantined
from ray_eagle.hidden_states.schema import Sample, encode, schema
from ray_eagle.run import Folder, content_hash, sync

MAGIC = b"ARROW1\0\0"
LONG_ROWS = pa.ipc.IpcWriteOptions(allow_64bit=True)
"""3H numbers for each token are more than 2^31 in a row of 100,000 tokens of a large target."""


class RowRecord(BaseModel):
    """Where a row's message lies in its file, and what it holds."""

    model_config = ConfigDict(extra="forbid")

    sample_id: str
    tokens: int
    teaching: int
    """S: positions with a teacher."""
    start: int
    """First byte of the message,"""
    bytes: int
    """and how many there are."""
    checksum: str
    """XXH3-128 of these bytes."""


class UnitRecord(BaseModel):
    """What a committed unit holds, and where it was made."""

    model_config = ConfigDict(extra="forbid")

    unit: int
    file: str
    """A name in this folder, or a whole path or URI when another dataset lends its rows."""
    rows: list[RowRecord]
    quarantined: list[Quarantined] = []
    """Planned samples that have no row."""
    tokens: int
    supervised_tokens: int
    """Tokens that the assistant wrote and a position predicts."""
    begin: int
    """Bytes before the first row,"""
    bytes: int
    """and in the whole file."""
    checksum: str
    """XXH3-128 of what is no row (the file's begin and end) and of the rows' checksums."""
    token_ids: list[int]
    """Supervised tokens that occur, ascending,"""
    token_counts: list[int]
    """and how often each does."""
    made_by: dict[str, Any]
    seal: str = ""
    """Hash of all of the above, set on commit: a damaged record is told from an intact one."""

    def expected_seal(self) -> str:
        return content_hash(self.model_dump(mode="json", exclude={"seal"}))


class ShardWriter:
    """One attempt at a unit. `close` it whatever happens: before `finish`, that deletes the file."""

    def __init__(self, folder: Folder, unit: int, hidden_size: int, state_dtype: str) -> None:
        """Raises DatasetError when the file cannot be opened."""
        self.folder = folder
        self.unit = unit
        self.name = f"unit-{unit:05d}.{secrets.token_hex(4)}.arrow"
        self.quarantined: list[Quarantined] = []
        self._kind = schema(hidden_size, state_dtype)
        self._rows: list[RowRecord] = []
        self._supervised: list[np.ndarray] = []
        self._finished = False
        try:
            self._file = self.folder.fs.open_output_stream(self.folder.file(self.name))
        except OSError as error:
            raise self._unwritable(error) from None
        self._stream = _Stream(self._file, begin=len(MAGIC) + len(self._kind.serialize()))
        self._writer = pa.ipc.new_file(pa.PythonFile(self._stream, "w"), self._kind, options=LONG_ROWS)

    def close(self) -> None:
        """Delete the file unless it is finished."""
        if self._finished:
            return
        try:
            self._file.close()
        except OSError:
            pass  # the disk is full: what matters is the error that came first
        finally:
            if self.folder.exists(self.name):
                self.folder.delete_file(self.name)

    def add(self, sample: Sample) -> None:
        """Append a row. Raises DatasetError when the filesystem takes no more."""
        try:
            self._writer.write_batch(encode(sample, self._kind))
        except OSError as error:
            raise self._unwritable(error) from None
        start, size, checksum = self._stream.cut()
        tokens, teaching = len(sample.input_ids), len(sample.last)
        self._rows.append(
            RowRecord(
                sample_id=sample.sample_id,
                tokens=tokens,
                teaching=teaching,
                start=start,
                bytes=size,
                checksum=checksum,
            )
        )
        self._supervised.append(sample.input_ids[1:][sample.loss_mask[1:].bool()].numpy())

    def finish(self) -> UnitRecord:
        """End the file and sync it; returns the record that would commit it."""
        try:
            self._writer.close()
            self._file.close()
            if self.folder.is_local:
                sync(Path(self.folder.file(self.name)))
        except OSError as error:
            raise self._unwritable(error) from None
        self._finished = True
        ids, counts = count_tokens(self._supervised)
        frame = [self._stream.begin_checksum, self._stream.cut()[2]]
        return UnitRecord(
            unit=self.unit,
            file=self.name,
            rows=self._rows,
            quarantined=self.quarantined,
            tokens=sum(row.tokens for row in self._rows),
            supervised_tokens=sum(counts),
            begin=self._stream.begin,
            bytes=self._stream.size,
            checksum=combined_checksum(frame, [row.checksum for row in self._rows]),
            token_ids=ids,
            token_counts=counts,
            made_by={"host": socket.gethostname(), "pid": os.getpid()},
        )

    def _unwritable(self, error: OSError) -> DatasetError:
        return DatasetError(
            f"{self.folder.file(self.name)} cannot be written ({error}). Free some space, or check the filesystem; then run "
            "the stage again: what was committed is kept, and this attempt was removed."
        )


def count_tokens(parts: list[np.ndarray]) -> tuple[list[int], list[int]]:
    """Distinct token ids, ascending, and how often each occurs."""
    ids, counts = np.unique(np.concatenate(parts) if parts else np.empty(0, np.int32), return_counts=True)
    return ids.tolist(), counts.tolist()


def combined_checksum(frame: list[str], rows: list[str]) -> str:
    """Of a whole file: from the checksums of its begin, its end and its rows."""
    return xxhash.xxh3_128_hexdigest(" ".join([*frame, *rows]).encode())


class _Stream:
    """Passes bytes on, and hashes them between cuts. The first cut is made where the file's begin ends."""

    closed = False

    def __init__(self, stream: Any, begin: int) -> None:
        self.stream = stream
        self.begin = begin
        """Bytes of the magic and the schema's message: Arrow writes them with the first row."""
        self.begin_checksum = ""
        self.size = 0
        self._start = 0
        self._digest = xxhash.xxh3_128()

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        self._digest.update(data)
        self.stream.write(data)
        self.size += size
        if self.size == self.begin:
            self.begin_checksum = self.cut()[2]
        return size

    def cut(self) -> tuple[int, int, str]:
        """First byte, number and checksum of what was written since the last cut."""
        part = (self._start, self.size - self._start, self._digest.hexdigest())
        self._start, self._digest = self.size, xxhash.xxh3_128()
        return part

    def flush(self) -> None: ...

    def close(self) -> None:
        self.closed = True
