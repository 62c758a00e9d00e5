"""Read a dataset: any sample by its number, as views of what was read.

Local files are memory-mapped. On network filesystems, where a page of a map that vanished kills the process, and on object
stores, each row is one positional read. `batches` reads ahead into buffers that are used again and again.
"""

import mmap
import os
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
import xxhash

from ray_eagle.conversations.prompts import Split
from ray_eagle.errors import DatasetError
from ray_eagle.hidden_states.dataset import read_plan, read_records, record_name
from ray_eagle.hidden_states.schema import Sample, decode, schema
from ray_eagle.hidden_states.shard import RowRecord
from ray_eagle.run import Folder

ALIGN = 64
"""Bytes: where Arrow aligns a row's buffers in its file, and therefore in ours."""
OPEN_FILES = 128
"""Shards open at once: a dataset of terabytes has more of them than a process may open."""
NETWORK = ("nfs", "cifs", "smb", "lustre", "ceph", "gpfs", "beegfs", "glusterfs", "9p", "fuse")


@dataclass(frozen=True)
class Row:
    """One row and where it lies."""

    file: str
    record: RowRecord
    lender: str | None
    """Of its unit."""


class HiddenStates:
    """The committed samples of one split, in plan order."""

    def __init__(self, folder: Folder, split: Split) -> None:
        """Raises DatasetError when a unit of the split is not committed."""
        self.folder = folder
        self.plan = read_plan(folder)
        # token counts are for the vocabulary map alone, and most of what a record holds
        self.records = {
            index: record.model_copy(update={"token_ids": [], "token_counts": []})
            for index, record in read_records(folder, self.plan).items()
        }
        self.rows: list[Row] = []
        for index, unit in enumerate(self.plan.units):
            if unit.split == split:
                if index not in self.records:
                    raise DatasetError(
                        f"{folder.file(record_name(index))} is missing: unit {index} was never committed. {way_out(folder, None)}"
                    )
                record = self.records[index]
                self.rows += [Row(record.file, row, unit.lender) for row in record.rows]
        self._schema = schema(self.plan.hidden_size, self.plan.state_dtype)
        self._files: OrderedDict[str, _File] = OrderedDict()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Sample:
        """Sample number `index`; its tensors are read-only views of the file, or of the bytes that were read."""
        row = self.rows[index]
        return self._decode(self._file(row).read(row.record), row)

    def __iter__(self) -> Iterator[Sample]:
        return (self[i] for i in range(len(self)))

    def lengths(self) -> list[int]:
        """Tokens of each sample, without reading it."""
        return [row.record.tokens for row in self.rows]

    def shard(self, rank: int, world: int) -> "HiddenStates":
        """Every `world`-th sample from `rank` on: together the ranks see each sample once."""
        part = copy(self)
        part.rows, part._files = self.rows[rank::world], OrderedDict()
        return part

    def by_id(self) -> "HiddenStates":
        """The same samples in the order of their ids: whatever units and formats they lie in, the order is one."""
        ordered = copy(self)
        ordered.rows, ordered._files = sorted(self.rows, key=lambda row: row.record.sample_id), OrderedDict()
        return ordered

    def check(self, index: int) -> None:
        """Raises DatasetError when the bytes of a sample are not the ones that were written."""
        row = self.rows[index]
        found = xxhash.xxh3_128_hexdigest(self._file(row).read(row.record))
        if found != row.record.checksum:
            raise DatasetError(
                f"{row.file}, sample {row.record.sample_id}: checksum {row.record.checksum} was stored, {found} found. "
                f"{way_out(self.folder, row.lender)}"
            )

    def batches(self, groups: Iterable[list[int]], *, ahead: int = 2, threads: int = 2) -> Iterator[list[Sample]]:
        """The samples of each group of numbers, while `threads` read up to `ahead` groups ahead.

        The tensors live in a buffer that is filled again: they are valid until the next group is asked for.
        """
        with ThreadPoolExecutor(threads, thread_name_prefix="eagle-read") as pool:
            free = deque(_Buffer() for _ in range(ahead + 1))
            loading: deque[tuple[_Buffer, list[Row], Future[None]]] = deque()
            waiting = iter(groups)

            def start_next() -> None:
                group = next(waiting, None)
                if group is not None:
                    buffer = free.popleft()
                    rows = [self.rows[i] for i in group]
                    buffer.lay_out([row.record for row in rows])
                    files = [self._file(row) for row in rows]
                    loading.append((buffer, rows, pool.submit(_read_all, files, rows, buffer.parts)))

            try:
                for _ in range(ahead + 1):
                    start_next()
                while loading:
                    buffer, rows, read = loading.popleft()
                    read.result()
                    yield [self._decode(pa.py_buffer(part), row) for part, row in zip(buffer.parts, rows, strict=True)]
                    free.append(buffer)
                    start_next()
            finally:
                for _, _, read in loading:
                    read.cancel()

    def _file(self, row: Row) -> "_File":
        if row.file not in self._files:
            folder, name = locate(self.folder, row.file)
            self._files[row.file] = open_file(folder, name, way_out(self.folder, row.lender))
            if len(self._files) > OPEN_FILES:
                self._files.popitem(last=False)
        self._files.move_to_end(row.file)
        return self._files[row.file]

    def _decode(self, message: Any, row: Row) -> Sample:
        try:
            return decode(pa.ipc.read_record_batch(message, self._schema))
        except (pa.ArrowException, OSError, UnicodeDecodeError, RuntimeError) as error:
            fix = way_out(self.folder, row.lender)
            raise damaged(row.file, f"sample {row.record.sample_id}: {error}", fix) from None


def locate(folder: Folder, file: str) -> tuple[Folder, str]:
    """The folder and name of a shard or record: in the dataset's own folder, or at a place in its lender's."""
    if "/" not in file:
        return folder, file
    base, mark, options = file.partition("?")
    lender, _, name = base.rpartition("/")
    return Folder.at(lender + mark + options), name


def way_out(dataset: Folder, lender: str | None) -> str:
    """Of damaged rows. Those that are borrowed (`lender`: the record that lends them) must be made again where they lie."""
    here = f"`ray-eagle verify {dataset.uri} --repair`, then `ray-eagle extract`"
    if lender is None:
        return f"Run {here}."
    there = locate(dataset, lender)[0].uri
    return (
        f"It is borrowed: run `ray-eagle verify {there} --repair` and `ray-eagle extract` in the run that lends first, then "
        f"{here} here. If that run is gone, take it out of extract.share and run `ray-eagle extract --redo`."
    )


def open_file(folder: Folder, name: str, fix: str) -> "_File":
    """A shard of a dataset, or of its lender, for reading. Raises DatasetError, which ends with `fix`, when it is missing or
    empty."""
    path = folder.file(name)
    try:
        if not folder.is_local:
            return _Remote(folder.fs.open_input_file(path), path, fix)
        return _Positional(path, fix) if on_network(Path(path).resolve()) else _Mapped(path, fix)
    except (OSError, ValueError) as error:
        raise damaged(path, str(error), fix) from None


def damaged(path: str, reason: str, fix: str) -> DatasetError:
    return DatasetError(f"shard {path} cannot be read ({reason}). {fix}")


def on_network(path: Path, mounts: str | None = None) -> bool:
    """Whether a file lies on a network filesystem, by the mount that holds it (/proc/self/mounts)."""
    if mounts is None:
        source = Path("/proc/self/mounts")
        mounts = source.read_text() if source.exists() else ""
    best, kind = -1, ""
    for line in mounts.splitlines():
        _, point, fstype, *_ = line.split(" ")
        point = point.replace("\\040", " ")
        if path.is_relative_to(point) and len(point) > best:
            best, kind = len(point), fstype
    return kind.startswith(NETWORK)


class _File:
    """A shard that rows are read from."""

    def read(self, row: RowRecord) -> pa.Buffer:
        """The row's message. Raises DatasetError when the file is too short."""
        raise NotImplementedError

    def read_into(self, row: RowRecord, part: memoryview) -> None:
        """Read the row's message to where it shall lie."""
        raise NotImplementedError


class _Positional(_File):
    def __init__(self, path: str, fix: str) -> None:
        self.path, self.fix = path, fix
        self.handle = os.open(path, os.O_RDONLY)

    def read(self, row: RowRecord) -> pa.Buffer:
        message = pa.allocate_buffer(row.bytes)
        self.read_into(row, memoryview(message).cast("B"))
        return message

    def read_into(self, row: RowRecord, part: memoryview) -> None:
        done = 0
        while done < row.bytes:
            count = os.preadv(self.handle, [part[done:]], row.start + done)
            if not count:
                raise damaged(self.path, f"sample {row.sample_id} is cut off", self.fix)
            done += count

    def __del__(self) -> None:
        if hasattr(self, "handle"):
            os.close(self.handle)


class _Mapped(_Positional):
    """Views of the page cache for single rows; batches are read, since faulting pages in one by one is slower."""

    def __init__(self, path: str, fix: str) -> None:
        super().__init__(path, fix)
        self.map = pa.py_buffer(mmap.mmap(self.handle, 0, prot=mmap.PROT_READ))

    def read(self, row: RowRecord) -> pa.Buffer:
        if row.start + row.bytes > len(self.map):
            raise damaged(self.path, f"sample {row.sample_id} is cut off", self.fix)
        return self.map.slice(row.start, row.bytes)


class _Remote(_File):
    def __init__(self, file: Any, path: str, fix: str) -> None:
        self.file, self.path, self.fix = file, path, fix

    def read(self, row: RowRecord) -> pa.Buffer:
        try:
            message = pa.py_buffer(self.file.read_at(row.bytes, row.start))
        except OSError as error:
            raise damaged(self.path, str(error), self.fix) from None
        if len(message) != row.bytes:
            raise damaged(self.path, f"sample {row.sample_id} is cut off", self.fix)
        return message

    def read_into(self, row: RowRecord, part: memoryview) -> None:
        part[:] = memoryview(self.read(row)).cast("B")


def _read_all(files: list[_File], rows: list[Row], parts: list[memoryview]) -> None:
    """One task a group: each costs its thread, and the one that waits for it, as much as a short read."""
    for file, row, part in zip(files, rows, parts, strict=True):
        file.read_into(row.record, part)


class _Buffer:
    """Memory for the rows of one group, used again and grown when a group needs more."""

    def __init__(self) -> None:
        self.parts: list[memoryview] = []
        self._memory = torch.empty(0, dtype=torch.uint8)

    def lay_out(self, rows: list[RowRecord]) -> None:
        """Give each row a place, aligned as it is in its file."""
        starts, end = [], 0
        for row in rows:
            starts.append(end + row.start % ALIGN)
            end = -(-(starts[-1] + row.bytes) // ALIGN) * ALIGN
        if len(self._memory) < end + ALIGN:
            self._memory = torch.empty(end + end // 4 + ALIGN, dtype=torch.uint8)
        base = -self._memory.data_ptr() % ALIGN
        whole = memoryview(self._memory.numpy())
        self.parts = [whole[base + s : base + s + row.bytes] for s, row in zip(starts, rows, strict=True)]
