"""Re-read everything that a dataset claims to hold, and name each fault."""

import hashlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import pyarrow as pa

from ray_eagle.errors import DatasetError, InputError
from ray_eagle.hidden_states.dataset import UnitRecord, parse_record, read_plan, record_name, refuse_if_locked
from ray_eagle.hidden_states.plan import DatasetPlan
from ray_eagle.hidden_states.reader import open_shard
from ray_eagle.hidden_states.schema import Sample, decode, sample_id, schema
from ray_eagle.run import Folder


@dataclass(frozen=True)
class Fault:
    """One sentence that names the file and, where it lies in one, the sample."""

    unit: int
    message: str


def verify(folder: Folder, progress: Callable[[int, int], None] | None = None) -> list[Fault]:
    """Faults of the dataset. Empty: all is well."""
    plan = read_plan(folder)
    faults: list[Fault] = []
    for index in range(len(plan.units)):
        faults += [Fault(index, message) for message in _verify_unit(folder, plan, index)]
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


def _verify_unit(folder: Folder, plan: DatasetPlan, index: int) -> list[str]:
    name = record_name(index)
    try:
        record = parse_record(folder.read_bytes(name))
    except InputError:
        return [f"{folder.file(name)}: missing, unit {index} was never committed"]
    except ValueError as error:
        return [f"{folder.file(name)}: damaged record ({error})"]
    path = folder.file(record.file)
    try:
        data = folder.read_bytes(record.file)
    except InputError:
        return [f"{path}: missing, {name} names it"]
    faults = []
    if len(data) != record.bytes:
        faults.append(f"{path}: {record.bytes} bytes were written, {len(data)} found")
    elif hashlib.blake2b(data, digest_size=16).hexdigest() != record.checksum:
        faults.append(f"{path}: the file's checksum differs from its record")
    del data
    try:
        faults += _verify_rows(folder, plan, index, record)
    except (DatasetError, pa.ArrowInvalid, OSError, UnicodeDecodeError) as error:
        faults.append(f"{path}: {error}")
    return faults


def _verify_rows(folder: Folder, plan: DatasetPlan, index: int, record: UnitRecord) -> list[str]:
    path = folder.file(record.file)
    reader = open_shard(folder, record.file)
    faults, found, tokens = [], [], 0
    counts: Counter[int] = Counter()
    if not reader.schema.equals(schema(plan.hidden_size, plan.state_dtype)):
        return [f"{path}: its schema is not the dataset's"]
    for row in range(reader.num_record_batches):
        try:
            batch = reader.get_batch(row)
            batch.validate(full=True)
            sample = decode(batch, check=True)
        except (DatasetError, pa.ArrowInvalid, OSError, UnicodeDecodeError, ValueError, RuntimeError) as error:
            planned = plan.units[index].samples
            faults.append(f"{path}, row {row} (sample {planned[row] if row < len(planned) else 'unknown'}): {error}")
            continue
        faults += [f"{path}, row {row}, sample {sample.sample_id}: {fault}" for fault in _faults_in(sample)]
        found.append(sample.sample_id)
        tokens += len(sample.input_ids)
        counts.update(sample.input_ids[1:][sample.loss_mask[1:].bool()].tolist())
    if not faults:
        stated = dict(zip(record.token_ids, record.token_counts, strict=False))
        claims = (record.rows, record.tokens, record.supervised_tokens, stated, record.unit)
        if found != plan.units[index].samples:
            faults.append(f"{path}: its samples are not the ones planned for unit {index}")
        elif claims != (len(found), tokens, counts.total(), dict(counts), index):
            faults.append(f"{folder.file(record_name(index))}: its counts are not those of {record.file}")
    return faults


def _faults_in(sample: Sample) -> list[str]:
    teaching = int(sample.loss_mask[1:].sum())
    faults = []
    if sample_id(sample.input_ids.tolist(), sample.loss_mask.tolist()) != sample.sample_id:
        faults.append("its id is not the hash of its tokens and mask")
    if len(sample.aux) != len(sample.input_ids) or len(sample.last) != teaching or len(sample.top1) != teaching:
        faults.append("lengths of tokens, mask and states do not belong together")
    if not (sample.aux.isfinite().all() and sample.last.isfinite().all() and sample.lse.isfinite().all()):
        faults.append("NaN or infinite states")
    return faults
