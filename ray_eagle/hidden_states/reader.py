"""Read a dataset: random access by sample, memory-mapped where files are local, views instead of copies."""

from collections.abc import Iterator

import pyarrow as pa

from ray_eagle.conversations.prompts import Split
from ray_eagle.errors import DatasetError
from ray_eagle.hidden_states.dataset import read_plan, read_records, record_name
from ray_eagle.hidden_states.schema import Sample, decode
from ray_eagle.run import Folder


class HiddenStates:
    """The committed samples of one split, in plan order."""

    def __init__(self, folder: Folder, split: Split) -> None:
        """Raises DatasetError when a unit of the split is not committed."""
        self.folder = folder
        self.plan = read_plan(folder)
        self.records = read_records(folder, self.plan)
        self._rows: list[tuple[int, int]] = []
        for index, unit in enumerate(self.plan.units):
            if unit.split == split:
                if index not in self.records:
                    raise DatasetError(
                        f"{folder.file(record_name(index))} is missing: unit {index} was never committed. Run `ray-eagle verify {folder.path} --repair`, then `ray-eagle extract`."
                    )
                self._rows += [(index, row) for row in range(self.records[index].rows)]
        self._open: dict[int, pa.ipc.RecordBatchFileReader] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Sample:
        """Sample number `index`; its tensors are read-only views of the file."""
        unit, row = self._rows[index]
        return decode(self._reader(unit).get_batch(row))

    def lengths(self) -> list[int]:
        """Tokens of each sample, from the ids alone."""
        return [len(self._reader(unit).get_batch(row).column("input_ids")[0]) for unit, row in self._rows]

    def __iter__(self) -> Iterator[Sample]:
        return (self[i] for i in range(len(self)))

    def _reader(self, unit: int) -> pa.ipc.RecordBatchFileReader:
        if unit not in self._open:
            self._open[unit] = open_shard(self.folder, self.records[unit].file)
        return self._open[unit]


def open_shard(folder: Folder, name: str) -> pa.ipc.RecordBatchFileReader:
    """An Arrow file, memory-mapped when local. Raises DatasetError when it is missing or damaged."""
    path = folder.file(name)
    try:
        source = pa.memory_map(path) if folder.is_local else folder.fs.open_input_file(path)
        return pa.ipc.open_file(source)
    except (OSError, pa.ArrowInvalid) as error:
        raise DatasetError(
            f"shard {path} cannot be read ({error}). Run `ray-eagle verify {folder.path} --repair`, then `ray-eagle extract`."
        ) from None
