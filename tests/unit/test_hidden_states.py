"""The dataset: round trips, exactly-once commits, locks, and every damage found by verify."""

import io
import os
import random
import socket
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs
import pytest
import torch

from ray_eagle import lock
from ray_eagle.errors import DatasetError, LockedError
from ray_eagle.hidden_states.dataset import DatasetWriter, parse_record, read_plan, record_name
from ray_eagle.hidden_states.quantise import groups
from ray_eagle.hidden_states.reader import HiddenStates, open_file
from ray_eagle.hidden_states.schema import STATE_DTYPES, Sample, decode, schema
from ray_eagle.hidden_states.shard import ShardWriter
from ray_eagle.hidden_states.verify import discard, verify
from ray_eagle.run import Folder
from tests.random_data import make_plan, random_dataset, random_states, write_shard

SPLITS = ("train", "validation", "held_out")


def equal(one: Sample, other: Sample) -> bool:
    return all(
        torch.equal(a, b) and a.dtype == b.dtype if isinstance(a, torch.Tensor) else a == b
        for a, b in zip(vars(one).values(), vars(other).values(), strict=True)
    )


@pytest.mark.parametrize("state_dtype", list(STATE_DTYPES))
def test_what_is_read_is_what_was_written_bit_for_bit(tmp_path: Path, state_dtype: str) -> None:
    folder, units, written = random_dataset(tmp_path, samples=40, state_dtype=state_dtype, seed=1)
    assert len(units) > 6
    read = [sample for split in SPLITS for sample in HiddenStates(folder, split)]
    assert {s.sample_id for s in read} == written.keys()
    assert all(equal(sample, written[sample.sample_id]) for sample in read)
    assert verify(folder) == []


class Sparse(pafs.LocalFileSystem):
    """Large pieces that are written are zeros here: they become holes, which take no disk."""

    def open_output_stream(self, path: str) -> Any:
        return Holes(path, "w")


class Holes(io.FileIO):
    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        return super().write(data) if size < 2**20 else self.seek(size, os.SEEK_CUR)

    def close(self) -> None:
        if not self.closed:
            self.truncate()
        super().close()


def test_a_row_of_more_than_2_to_the_31_numbers_is_written_and_read(tmp_path: Path) -> None:
    hidden = 7168
    tokens = 2**31 // (3 * hidden) + 1
    sample = Sample(
        "long",
        "s",
        torch.zeros(tokens, dtype=torch.int32),
        torch.zeros(tokens, dtype=torch.uint8),
        torch.from_numpy(np.zeros((tokens, 3 * hidden), np.uint8)).view(torch.float8_e4m3fn),  # pages nobody touches
        torch.ones(1, hidden, dtype=torch.bfloat16),
        torch.ones(1, dtype=torch.int32),
        torch.ones(1),
        torch.from_numpy(np.zeros((tokens, 3 * groups(hidden)), np.uint8)),
    )
    folder = Folder(Sparse(), str(tmp_path))
    with closing(ShardWriter(folder, 0, hidden, "float8")) as writer:
        writer.add(sample)
        record = writer.finish()
    shard = Path(folder.file(record.file))
    assert shard.stat().st_size == record.bytes > 2**31 and shard.stat().st_blocks * 512 < 2**24
    assert pa.ipc.open_file(pa.memory_map(str(shard))).num_record_batches == 1  # as any Arrow reader sees it
    message = open_file(folder, record.file, "").read(record.rows[0])
    read = decode(pa.ipc.read_record_batch(message, schema(hidden, "float8")))
    assert read.aux.shape == sample.aux.shape and read.aux[-1].float().count_nonzero() == 0
    assert torch.equal(read.last, sample.last) and torch.equal(read.lse, sample.lse)


def test_random_access_gives_the_planned_sample_of_the_split(tmp_path: Path) -> None:
    folder, units, written = random_dataset(tmp_path, samples=30)
    for split in SPLITS:
        planned = [row.sample_id for unit in units if unit.split == split for row in unit.samples]
        states = HiddenStates(folder, split)
        assert len(states) == len(planned)
        assert states.lengths() == [len(written[name].input_ids) for name in planned]
        for index in random.Random(0).choices(range(len(planned)), k=20):
            assert equal(states[index], written[planned[index]])


def test_tensors_are_views_of_the_memory_mapped_file(tmp_path: Path) -> None:
    folder, _, _ = random_dataset(tmp_path)
    states = HiddenStates(folder, "train")
    first, again = states[0], states[0]
    assert first.aux.data_ptr() == again.aux.data_ptr()
    maps = Path("/proc/self/maps").read_text()
    regions = [line.split()[0].split("-") for line in maps.splitlines() if line.endswith(".arrow")]
    assert any(int(a, 16) <= first.aux.data_ptr() < int(b, 16) for a, b in regions)


def test_last_states_stand_exactly_where_the_next_token_is_supervised(tmp_path: Path) -> None:
    folder, _, _ = random_dataset(tmp_path, samples=30)
    for sample in HiddenStates(folder, "train"):
        slow = sum(1 for s in range(len(sample.input_ids) - 1) if sample.loss_mask[s + 1])
        assert len(sample.last) == len(sample.top1) == len(sample.lse) == slow


def test_a_second_driver_is_refused_naming_the_first(tmp_path: Path) -> None:
    folder, units, _ = random_dataset(tmp_path)
    plan = read_plan(folder)
    with (
        DatasetWriter(folder, plan),
        pytest.raises(LockedError, match=rf"process {os.getpid()} on {socket.gethostname()}"),
        DatasetWriter(folder, plan),
    ):
        pass
    assert not folder.exists(lock.LOCK)
    with DatasetWriter(folder, plan) as writer:
        assert len(writer.records) == len(units)


def test_on_an_object_store_a_folder_has_one_driver_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing there can be created only if absent: of two drivers that saw no lock, the one whose lock is overwritten stops."""
    monkeypatch.setattr(lock, "SETTLE_S", 0.05)
    local, units, written = random_dataset(tmp_path / "local")
    store = Folder(pafs.SubTreeFileSystem(str(tmp_path), pafs.LocalFileSystem()), "store")
    plan = read_plan(local)
    with DatasetWriter(store, plan) as writer:
        for unit in units:
            writer.commit(write_shard(store, unit, [written[s.sample_id] for s in unit.samples], 8, "bfloat16"))
        with pytest.raises(LockedError, match=rf"process {os.getpid()} on"), DatasetWriter(store, plan):
            pass
    assert verify(store) == [] and not store.exists(lock.LOCK)
    for index in range(len(units)):
        one, other = (folder.read_bytes(folder.read_json(record_name(index))["file"]) for folder in (local, store))
        assert one == other

    def another_driver(seconds: float) -> None:
        store.write_json(lock.LOCK, {"host": "elsewhere", "pid": 1, "started": "1", "nonce": "x"})

    monkeypatch.setattr(lock.time, "sleep", another_driver)
    with pytest.raises(LockedError, match="elsewhere"), DatasetWriter(store, plan):
        pass
    assert store.read_json(lock.LOCK)["host"] == "elsewhere"


def test_the_lock_of_a_dead_driver_is_taken_over(tmp_path: Path) -> None:
    folder, _, _ = random_dataset(tmp_path)
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    folder.write_json(lock.LOCK, {**lock._here(), "pid": gone.pid, "started": "1"})
    with DatasetWriter(folder, read_plan(folder)) as writer:
        assert writer.records
    for elsewhere in ({"host": "elsewhere"}, {"processes": "pid:[1]"}, {"boot": "before"}):
        folder.write_json(lock.LOCK, {**lock._here(), "pid": gone.pid, "started": "1", **elsewhere})
        with (
            pytest.raises(LockedError, match=r"process.*delete .*lock\.json"),
            DatasetWriter(folder, read_plan(folder)),
        ):
            pass


def test_of_two_that_take_over_a_dead_lock_one_gets_it(tmp_path: Path) -> None:
    """Both saw the dead holder; the slower one must not delete the faster one's lock."""
    folder, _, _ = random_dataset(tmp_path)
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    plan = read_plan(folder)
    folder.write_json(lock.LOCK, {**lock._here(), "pid": gone.pid, "started": "1"})
    dead = lock.refuse_if_locked(folder)
    assert dead
    with DatasetWriter(folder, plan) as writer:
        slower = DatasetWriter(folder, plan)
        slower.lock._take_away(dead)
        assert writer.lock.held()
        with pytest.raises(LockedError, match=f"process {os.getpid()}"):
            slower.__enter__()
        assert writer.lock.held() and folder.exists(lock.LOCK)
        folder.write_json(lock.LOCK, {"host": "elsewhere"})
    assert folder.read_json(lock.LOCK) == {"host": "elsewhere"}  # a lock that is another's stays


def test_a_unit_with_other_samples_than_planned_is_not_committed(tmp_path: Path) -> None:
    folder, units, written = random_dataset(tmp_path)
    folder.delete_file(record_name(0))
    with DatasetWriter(folder, read_plan(folder)) as writer:
        fewer = write_shard(folder, units[0], [written[s.sample_id] for s in units[0].samples[1:]], 8, "bfloat16")
        with pytest.raises(DatasetError, match="other samples than planned"):
            writer.commit(fewer)
        whole = [
            write_shard(folder, units[0], [written[s.sample_id] for s in units[0].samples], 8, "bfloat16")
            for _ in range(2)
        ]
        writer.commit(whole[0], disturbed=True)
        assert folder.exists(whole[0].file) and not folder.exists(whole[1].file) and not folder.exists(fewer.file)
    assert verify(folder) == []


def test_what_cannot_be_read_is_a_fault_and_no_end(tmp_path: Path) -> None:
    folder, units, _ = random_dataset(tmp_path)
    record = parse_record(folder.read_bytes(record_name(0)))
    shard = Path(folder.file(record.file))
    shard.unlink()
    shard.mkdir()
    last = Path(folder.file(record_name(len(units) - 1)))
    last.unlink()
    faults = verify(folder)
    assert [f.unit for f in faults] == [0, len(units) - 1]
    assert f"{shard}: cannot be read" in faults[0].message


def test_attempts_without_a_record_are_swept_and_committed_ones_kept(tmp_path: Path) -> None:
    folder, units, written = random_dataset(tmp_path)
    generator = torch.Generator().manual_seed(9)
    states = [random_states(generator, r, 8, torch.bfloat16, 50) for r in units[0].samples]
    abandoned = write_shard(folder, units[0], states, 8, "bfloat16")
    folder.write_bytes("unit-00001.cut.arrow", b"half a file")
    with DatasetWriter(folder, read_plan(folder)) as writer:
        assert not folder.exists(abandoned.file) and not folder.exists("unit-00001.cut.arrow")
        with pytest.raises(DatasetError, match="committed twice"):
            writer.commit(abandoned)
    assert verify(folder) == []
    assert all(equal(s, written[s.sample_id]) for s in HiddenStates(folder, "train"))


def test_a_folder_with_another_plan_is_refused(tmp_path: Path) -> None:
    folder, units, _ = random_dataset(tmp_path)
    with (
        pytest.raises(DatasetError, match=r"another plan.*extract --redo"),
        DatasetWriter(folder, make_plan(units[:2], hidden=8, vocab=50)),
    ):
        pass
    assert not folder.exists(lock.LOCK)


def test_a_missing_unit_is_named(tmp_path: Path) -> None:
    folder, units, _ = random_dataset(tmp_path)
    index = next(u.index for u in units if u.split == "validation")
    folder.delete_file(record_name(index))
    with pytest.raises(DatasetError, match=f"unit {index} was never committed"):
        HiddenStates(folder, "validation")
    assert len(HiddenStates(folder, "train"))
    [fault] = verify(folder)
    assert fault.unit == index
    assert fault.message == f"{folder.file(record_name(index))}: missing, unit {index} was never committed"


def test_the_same_samples_give_the_same_bytes(tmp_path: Path) -> None:
    one, units, _ = random_dataset(tmp_path / "one", seed=7)
    other, _, _ = random_dataset(tmp_path / "other", seed=7)
    for index in range(len(units)):
        a, b = (folder.read_json(record_name(index)) for folder in (one, other))
        assert a["checksum"] == b["checksum"] and a["file"] != b["file"]
        assert one.read_bytes(a["file"]) == other.read_bytes(b["file"])


@pytest.mark.parametrize("state_dtype", list(STATE_DTYPES))
def test_every_random_bit_flip_and_truncation_is_found_and_named(tmp_path: Path, state_dtype: str) -> None:
    """1,000 of them in all: by file, and by sample where the damage lies in one."""
    folder, _, _ = random_dataset(tmp_path, samples=12, state_dtype=state_dtype)
    rng = random.Random(state_dtype)
    files = [n for n in folder.names() if n.startswith("unit-")]
    records = [parse_record(folder.read_bytes(n)) for n in files if n.endswith(".json")]
    samples_hit = 0
    for trial in range(334):
        name = rng.choice(files)
        path = Path(folder.file(name))
        original = path.read_bytes()
        place = rng.randrange(len(original))
        damaged = bytearray(original)
        if trial % 4:
            damaged[place] ^= 1 << rng.randrange(8)
        else:
            damaged = damaged[:place]
        path.write_bytes(damaged)
        faults = [fault.message for fault in verify(folder)]
        assert faults and all(folder.file(name) in fault for fault in faults), (name, place, faults)
        rows = [row for record in records if record.file == name for row in record.rows]
        hit = [row.sample_id for row in rows if row.start <= place < row.start + row.bytes]
        assert all(any(victim in fault for fault in faults) for victim in hit), (name, place, faults)
        samples_hit += len(hit)
        path.write_bytes(original)
    assert samples_hit > 50
    assert verify(folder) == []


def test_a_damaged_plan_is_said(tmp_path: Path) -> None:
    folder, _, _ = random_dataset(tmp_path)
    path = Path(folder.file("dataset.json"))
    path.write_text(path.read_text().replace('"hidden_size": 8', '"hidden_size": 9'))
    with pytest.raises(DatasetError, match=r"dataset\.json is damaged.*extract --redo"):
        verify(folder)
    path.write_text(path.read_text().replace("ray_eagle.hidden_states/2", "ray_eagle.hidden_states/1"))
    with pytest.raises(
        DatasetError, match=r"expected format ray_eagle.hidden_states/2, found ray_eagle.hidden_states/1"
    ):
        HiddenStates(folder, "train")


def test_a_flip_inside_a_sample_names_the_sample(tmp_path: Path) -> None:
    folder, units, written = random_dataset(tmp_path)
    record = folder.read_json(record_name(0))
    victim = written[units[0].samples[-1].sample_id]
    path = Path(folder.file(record["file"]))
    data = bytearray(path.read_bytes())
    at = data.find(victim.aux.view(torch.uint16).numpy().tobytes())
    assert at > 0
    data[at + 5] ^= 4
    path.write_bytes(data)
    faults = verify(folder)
    assert any(victim.sample_id in fault.message and "checksum" in fault.message for fault in faults)
    assert all(record["file"] in fault.message for fault in faults)


def test_not_a_dataset_is_said(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"expected a dataset with dataset\.json"):
        HiddenStates(Folder.at(tmp_path), "train")


def test_a_damaged_unit_is_discarded_and_can_be_committed_again(tmp_path: Path) -> None:
    folder, units, written = random_dataset(tmp_path)
    record = folder.read_json(record_name(1))
    path = Path(folder.file(record["file"]))
    path.write_bytes(path.read_bytes()[:-9])
    discard(folder, {fault.unit for fault in verify(folder)})
    with DatasetWriter(folder, read_plan(folder)) as writer:
        assert set(range(len(units))) - writer.records.keys() == {1}
        again = [written[row.sample_id] for row in units[1].samples]
        writer.commit(write_shard(folder, units[1], again, 8, "bfloat16"))
    assert verify(folder) == []
    assert folder.read_json(record_name(1))["checksum"] == record["checksum"]
