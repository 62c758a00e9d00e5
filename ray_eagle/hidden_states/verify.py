"""Re-read everything that a dataset claims to hold, and name each fault.

Damaged bytes are found by checksum before anything interprets them: each byte of a shard belongs to a row, or to the frame
around the rows, and the record has a checksum of each.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import xxhash

from ray_eagle.errors import DatasetError, InputError
from ray_eagle.hidden_states.dataset import parse_record, read_plan, record_name
from ray_eagle.hidden_states.lending import lent_record
from ray_eagle.hidden_states.plan import DatasetPlan
from ray_eagle.hidden_states.reader import locate, way_out
from ray_eagle.hidden_states.schema import Sample, decode, sample_id, schema
from ray_eagle.hidden_states.shard import UnitRecord, combined_checksum, count_tokens
from ray_eagle.lock import refuse_if_locked
from ray_eagle.run import Folder


@dataclass(frozen=True)
class Fault:
    """One sentence that names the file and, where it lies in one, the sample."""

    unit: int
    message: str
    lent: bool = False
    """The bytes are borrowed, and are the ones that would be borrowed again: the dataset that lends them comes first."""


def verify(folder: Folder, progress: Callable[[int, int], None] | None = None) -> list[Fault]:
    """Faults of the dataset. Empty: all is well. Raises DatasetError when the plan itself is damaged."""
    plan = read_plan(folder)
    faults: list[Fault] = []
    for index in range(len(plan.units)):
        faults += _verify_unit(folder, plan, index)
        if progress:
            progress(index + 1, len(plan.units))
    return faults


def discard(folder: Folder, units: set[int]) -> None:
    """Delete the records of these units and call the stage unfinished, so that the next `extract` makes them again."""
    refuse_if_locked(folder)
    for unit in units:
        if folder.exists(record_name(unit)):
            folder.delete_file(record_name(unit))
    if folder.exists("origin.json"):
        folder.write_json("origin.json", {**folder.read_json("origin.json"), "finished": None})


def _verify_unit(folder: Folder, plan: DatasetPlan, index: int) -> list[Fault]:
    try:
        record = _read_record(folder, plan, index)
    except DatasetError as error:
        return [Fault(index, str(error))]
    faults, lender = _verify_shard(folder, plan, record), plan.units[index].lender
    if faults and lender and _lends(lender, record.file):
        return [Fault(index, f"{fault}. {way_out(folder, lender)}", lent=True) for fault in faults]
    return [Fault(index, fault) for fault in faults]


def _read_record(folder: Folder, plan: DatasetPlan, index: int) -> UnitRecord:
    """Raises DatasetError, in the words of a fault."""
    path = folder.file(record_name(index))
    try:
        record = parse_record(folder.read_bytes(record_name(index)))
    except InputError:
        raise DatasetError(f"{path}: missing, unit {index} was never committed") from None
    except OSError as error:
        raise DatasetError(f"{path}: cannot be read ({error})") from None
    except ValueError as error:
        raise DatasetError(f"{path}: damaged record ({error})") from None
    held = [row.sample_id for row in record.rows]
    aside = {row.sample_id for row in record.quarantined}
    if record.unit != index or held != [s for s in plan.units[index].samples if s not in aside]:
        raise DatasetError(f"{path}: its samples are not the ones planned for unit {index}")
    return record


def _lends(lender: str, file: str) -> bool:
    """Whether borrowing again gives the same shard, or nothing: the lender did not make it again yet."""
    try:
        return lent_record(lender)[1] == file
    except (InputError, OSError, ValueError):
        return True


def _verify_shard(folder: Folder, plan: DatasetPlan, record: UnitRecord) -> list[str]:
    home, file = locate(folder, record.file)
    path = home.file(file)
    try:
        data = pa.py_buffer(home.read_bytes(file))
    except InputError:
        return [f"{path}: missing, {record_name(record.unit)} names it"]
    except OSError as error:
        return [f"{path}: cannot be read ({error})"]
    own = plan.units[record.unit].lender is None
    whole = _verify_frame(path, data, record) if own else []
    faults = [f"{path}, {fault}" for fault in _verify_rows(plan, data, record)]
    if own and not faults and not whole:
        return _verify_arrow(path, data, plan, record)
    return whole + faults


def _verify_frame(path: str, data: pa.Buffer, record: UnitRecord) -> list[str]:
    """What lies before the first and behind the last row."""
    if len(data) != record.bytes:
        return [f"{path}: {record.bytes} bytes were written, {len(data)} found"]
    end = record.rows[-1].start + record.rows[-1].bytes if record.rows else record.begin
    frame = [xxhash.xxh3_128_hexdigest(part) for part in (data[: record.begin], data[end:])]
    if combined_checksum(frame, [row.checksum for row in record.rows]) != record.checksum:
        return [f"{path}: the checksum of the file's begin and end differs from its record"]
    return []


def _verify_rows(plan: DatasetPlan, data: pa.Buffer, record: UnitRecord) -> list[str]:
    kind = schema(plan.hidden_size, plan.state_dtype)
    faults: list[str] = []
    supervised: list[np.ndarray] = []
    for number, row in enumerate(record.rows):
        where = f"row {number}, sample {row.sample_id}"
        message = data[row.start : row.start + row.bytes]
        if len(message) != row.bytes:
            faults.append(f"{where}: the file ends inside it")
        elif xxhash.xxh3_128_hexdigest(message) != row.checksum:
            faults.append(f"{where}: its checksum differs from its record")
        else:
            sample = decode(pa.ipc.read_record_batch(message, kind))
            faults += [f"{where}: {fault}" for fault in _faults_in(sample, row.sample_id, row.tokens, row.teaching)]
            supervised.append(sample.input_ids[1:][sample.loss_mask[1:].bool()].numpy())
    if not faults:
        tokens = sum(row.tokens for row in record.rows)
        ids, counts = count_tokens(supervised)
        claims = (record.tokens, record.supervised_tokens, record.token_ids, record.token_counts)
        if claims != (tokens, sum(counts), ids, counts):
            faults.append(f"{record_name(record.unit)}: its counts are not those of the rows")
    return faults


def _verify_arrow(path: str, data: pa.Buffer, plan: DatasetPlan, record: UnitRecord) -> list[str]:
    """The file as any Arrow reader sees it."""
    try:
        reader = pa.ipc.open_file(data)
        if not reader.schema.equals(schema(plan.hidden_size, plan.state_dtype)):
            return [f"{path}: its schema is not the dataset's"]
        if reader.num_record_batches != len(record.rows):
            return [f"{path}: {len(record.rows)} rows were written, {reader.num_record_batches} found"]
    except (pa.ArrowInvalid, OSError, DatasetError) as error:
        return [f"{path}: {error}"]
    return []


def _faults_in(sample: Sample, name: str, tokens: int, teaching: int) -> list[str]:
    faults = []
    if not name == sample.sample_id == sample_id(sample.input_ids.tolist(), sample.loss_mask.tolist()):
        faults.append("its id is not the hash of its tokens and mask")
    lengths = {len(sample.input_ids), len(sample.loss_mask), len(sample.aux)}
    teachers = {len(sample.last), len(sample.top1), len(sample.lse), int(sample.loss_mask[1:].sum())}
    if lengths != {tokens} or teachers != {teaching}:
        faults.append("lengths of tokens, mask and states do not belong together")
    elif not all(states.isfinite().all() for states in (sample.aux_states(), sample.last, sample.lse)):
        faults.append("NaN or infinite states")
    return faults
