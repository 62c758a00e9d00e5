"""The checkpoints of a training run: which exist, which to go on from, which to keep.

Ray Train copies a checkpoint to the run folder file by file, on any filesystem of pyarrow.fs, so a killed copy leaves a
part of one. What exists is decided as for hidden states: a record, written whole after the copy, names the folder and the
length and checksum of its state. A folder that no record names does not exist; a named one is checked before it is used.
"""

import math
import secrets
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow.fs as pafs
import torch
import xxhash

from ray_eagle.errors import InputError
from ray_eagle.run import Folder

STATE = "state.pt"
SCORE = "predicted_acceptance_length"
RECORD, ATTEMPT = "step-", "attempt-"
CHUNK = 1 << 24

Say = Callable[[str], object]


@dataclass(frozen=True)
class Record:
    """One checkpoint: the content of `checkpoints/step-NNNNNNNN.json`."""

    step: int
    folder: str
    """Below `checkpoints/`: the attempt (one Ray Train run), and Ray's folder in it."""
    bytes: int
    checksum: str
    """XXH3-128 of its state.pt."""
    figures: dict[str, float]
    """Of its validation."""

    @property
    def name(self) -> str:
        return f"{RECORD}{self.step:08d}.json"

    @property
    def score(self) -> tuple[float, int]:
        """To compare by: the predicted acceptance length (nan, no pass to walk, is lowest), then the step."""
        value = self.figures[SCORE]
        return (-math.inf if math.isnan(value) else value, self.step)


class Checkpoints:
    """The folder `checkpoints/` of a run."""

    def __init__(self, folder: Folder) -> None:
        self.folder = folder

    def records(self) -> list[Record]:
        """Ascending by step."""
        names = [name for name in self.folder.names() if name.startswith(RECORD)]
        return [Record(**self.folder.read_json(name)) for name in names]

    def commit(self, record: Record, keep: int) -> None:
        """Make a copied checkpoint exist, then remove all but the best and the newest `keep`.

        A copy that did not happen (Ray drops one when another worker died meanwhile) makes nothing.
        """
        if self._length(record) != record.bytes:
            return
        self.folder.write_json(record.name, asdict(record))
        records = self.records()
        wanted = {r.step for r in [*records[-keep:], max(records, key=lambda r: r.score)]}
        for old in (r for r in records if r.step not in wanted):
            self.folder.delete_file(old.name)
            self.folder.folder(old.folder).delete()

    def newest(self, say: Say) -> Record | None:
        """The newest whole one, to go on from; None when there is none at all. Says what is passed over.

        Raises InputError when all are damaged: training would begin again as if there had been none.
        """
        return self._first(reversed(self.records()), say)

    def best(self, say: Say) -> Record | None:
        """The whole one with the highest predicted acceptance length. Otherwise as `newest`."""
        return self._first(iter(sorted(self.records(), key=lambda r: r.score, reverse=True)), say)

    def load(self, record: Record, device: torch.device | str) -> dict[str, Any]:
        """Its state, tensors on a device."""
        with self.folder.fs.open_input_file(self._state(record)) as file:
            state: dict[str, Any] = torch.load(file, map_location=device, weights_only=True)
            return state

    def new_attempt(self) -> str:
        """A name for the next Ray Train run; clears away what no record names."""
        used = {record.folder.partition("/")[0] for record in self.records()}
        found = self._folders("")
        for attempt in found:
            for name in self._folders(attempt) if attempt in used else []:
                if not any(record.folder == f"{attempt}/{name}" for record in self.records()):
                    self.folder.folder(f"{attempt}/{name}").delete()
            if attempt not in used:
                self.folder.folder(attempt).delete()
        numbers = [int(name.removeprefix(ATTEMPT)) for name in found if name.startswith(ATTEMPT)]
        return f"{ATTEMPT}{max(numbers, default=0) + 1:04d}"

    def _first(self, records: Any, say: Say) -> Record | None:
        faults = []
        for record in records:
            fault = self._fault(record)
            if fault is None:
                return record
            faults.append(f"{self._state(record)}: {fault}")
            say(f"train: checkpoint of step {record.step} is damaged, looking for the one before: {faults[-1]}")
        if faults:
            raise InputError(
                f"no checkpoint is whole: {'; '.join(faults)}. Restore one of them, or begin again: `ray-eagle train --redo`."
            )
        return None

    def _fault(self, record: Record) -> str | None:
        """What is wrong with its state."""
        length = self._length(record)
        if length != record.bytes:
            return f"expected {record.bytes:,} bytes, found {length:,}" if length >= 0 else "missing"
        with self.folder.fs.open_input_stream(self._state(record)) as stream:
            found = _checksum(stream)
        return None if found == record.checksum else f"expected checksum {record.checksum}, found {found}"

    def _state(self, record: Record) -> str:
        return self.folder.file(f"{record.folder}/{STATE}")

    def _length(self, record: Record) -> int:
        """Bytes of its state, -1 without one."""
        info = self.folder.fs.get_file_info(self._state(record))
        return int(info.size) if info.type == pafs.FileType.File else -1

    def _folders(self, inside: str) -> list[str]:
        path = self.folder.file(inside) if inside else self.folder.path
        found = self.folder.fs.get_file_info(pafs.FileSelector(path, allow_not_found=True))
        return sorted(info.base_name for info in found if info.type == pafs.FileType.Directory)


def describe(state: Path, attempt: str, step: int, figures: dict[str, float]) -> Record:
    """The record of a state that was just saved, for a Ray Train folder of a name that no other has."""
    with state.open("rb") as stream:
        checksum = _checksum(stream)
    folder = f"{attempt}/{RECORD}{step:08d}-{secrets.token_hex(4)}"
    return Record(step, folder, state.stat().st_size, checksum, figures)


def _checksum(stream: Any) -> str:
    digest = xxhash.xxh3_128()
    while chunk := stream.read(CHUNK):
        digest.update(chunk)
    return digest.hexdigest()
