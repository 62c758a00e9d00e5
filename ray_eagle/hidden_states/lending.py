"""Rows that another run captured already: this dataset's plan and records name them, and nobody captures them again.

A row is where its record says, so borrowing costs no byte. What it asks for is that the lender stays: `verify` and the reader
say so when its shard is gone.
"""

from collections.abc import Iterable

import numpy as np

from ray_eagle.errors import DatasetError, InputError
from ray_eagle.hidden_states.dataset import PLAN, parse_record, read_plan, read_records, record_name
from ray_eagle.hidden_states.plan import DatasetPlan, Unit
from ray_eagle.hidden_states.reader import locate
from ray_eagle.hidden_states.shard import UnitRecord, combined_checksum, count_tokens
from ray_eagle.run import FOLDERS, Folder

MUST_EQUAL = (
    "aux_layers",
    "hidden_size",
    "vocab_size",
    "state_dtype",
    "compute_dtype",
    "last_norm",
    "layer_convention",
)


def lent_rows(lenders: Iterable[str], plan: DatasetPlan) -> dict[str, str]:
    """sample_id -> place of the record of the committed unit that holds it, over other runs' folders.

    Raises DatasetError for one that was captured otherwise than `plan` says.
    """
    lent: dict[str, str] = {}
    for place in lenders:
        folder = _dataset(place)
        other = read_plan(folder)
        differing = [
            f"{name} is {getattr(other, name)!r} there and {getattr(plan, name)!r} here"
            for name in MUST_EQUAL
            if getattr(other, name) != getattr(plan, name)
        ]
        differing += [
            f"the target's {part} differ"
            for part in ("config", "weights")
            if other.target.get(part) != plan.target.get(part)
        ]
        if differing:
            raise DatasetError(
                f"{folder.path} cannot lend its rows: {'; '.join(differing)}. Take it out of extract.share, or use the same settings."
            )
        for unit, record in read_records(folder, other).items():
            place = folder.place(record_name(unit))
            lent |= {row.sample_id: place for row in record.rows if row.sample_id not in lent}
    return lent


def lent_record(place: str) -> tuple[UnitRecord, str]:
    """The record of a lender, and where its shard lies. Raises InputError or OSError when it cannot be read, ValueError when it
    is damaged."""
    folder, name = locate(Folder.at("."), place)
    record = parse_record(folder.read_bytes(name))
    return record, record.file if "/" in record.file else folder.place(record.file)


def borrowed(unit: Unit) -> UnitRecord:
    """The record of a unit whose rows lie in its lender's shard. Raises DatasetError when the lender has no such rows."""
    assert unit.lender is not None
    try:
        lender, file = lent_record(unit.lender)
    except (InputError, ValueError) as error:
        raise DatasetError(
            f"{unit.lender} was to lend {len(unit.samples)} samples ({error}). Run `ray-eagle extract` in the run that lends, "
            "or capture them here: take it out of extract.share and run `ray-eagle extract --redo`."
        ) from None
    there = {row.sample_id: row for row in lender.rows}
    missing = [s.sample_id for s in unit.samples if s.sample_id not in there]
    if missing:
        raise DatasetError(
            f"{unit.lender} was to lend {len(unit.samples)} samples and does not hold {len(missing)} of them ({missing[0]}, ...). "
            "Redo this run's hidden states: `ray-eagle extract --redo`."
        )
    rows = [there[s.sample_id] for s in unit.samples]
    supervised = [np.array(s.input_ids, np.int32)[1:][np.array(s.loss_mask[1:], bool)] for s in unit.samples]
    ids, counts = count_tokens(supervised)
    return UnitRecord(
        unit=unit.index,
        file=file,
        rows=rows,
        tokens=unit.tokens,
        supervised_tokens=sum(counts),
        begin=0,
        bytes=sum(row.bytes for row in rows),
        checksum=combined_checksum([], [row.checksum for row in rows]),
        token_ids=ids,
        token_counts=counts,
        made_by={"lender": unit.lender},
    )


def _dataset(place: str) -> Folder:
    """The dataset of a run, or the dataset itself."""
    folder = Folder.at(place)
    return folder if folder.exists(PLAN) else folder.folder(FOLDERS["extract"])
