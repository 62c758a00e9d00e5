"""Reading ahead, positional reads, other filesystems and lent rows, against plain one-by-one access."""

import random
import re
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.fs as pafs
import pytest
import torch

from ray_eagle.errors import DatasetError
from ray_eagle.hidden_states import reader
from ray_eagle.hidden_states.dataset import DatasetWriter, read_plan, record_name
from ray_eagle.hidden_states.lending import borrowed, lent_rows
from ray_eagle.hidden_states.plan import Unit
from ray_eagle.hidden_states.reader import HiddenStates, on_network
from ray_eagle.hidden_states.schema import STATE_DTYPES, Sample, encode, schema
from ray_eagle.hidden_states.verify import Fault, discard, verify
from ray_eagle.run import Folder
from tests.random_data import make_plan, random_dataset, write_shard
from tests.unit.test_hidden_states import equal


def slow_read(folder: Folder, name: str) -> list[Sample]:
    """Every row of a shard as pyarrow alone reads the file."""
    from ray_eagle.hidden_states.schema import decode

    with pa.OSFile(folder.file(name)) as file:
        table = pa.ipc.open_file(file)
        return [decode(table.get_batch(i)) for i in range(table.num_record_batches)]


def through_a_subtree(folder: Folder) -> Folder:
    """The same folder on a filesystem that is not the local one: positional reads, as on an object store."""
    root, name = folder.path.rsplit("/", 1)
    return Folder(pafs.SubTreeFileSystem(root, pafs.LocalFileSystem()), name)


@pytest.mark.parametrize("state_dtype", list(STATE_DTYPES))
def test_a_shard_is_a_plain_arrow_file(tmp_path: Path, state_dtype: str) -> None:
    folder, units, _ = random_dataset(tmp_path, samples=30, state_dtype=state_dtype)
    states = HiddenStates(folder, "train")
    plain = [s for i, u in enumerate(units) if u.split == "train" for s in slow_read(folder, states.records[i].file)]
    assert len(plain) == len(states) > 5
    assert all(equal(a, b) for a, b in zip(plain, states, strict=True))


def test_the_bytes_of_a_shard_are_those_of_arrows_plain_writer(tmp_path: Path) -> None:
    folder, units, written = random_dataset(tmp_path)
    kind = schema(8, "bfloat16")
    for unit in units:
        plain = pa.BufferOutputStream()
        with pa.ipc.new_file(plain, kind) as writer:
            for sample in unit.samples:
                writer.write_batch(encode(written[sample.sample_id], kind))
        assert plain.getvalue().to_pybytes() == folder.read_bytes(folder.read_json(record_name(unit.index))["file"])


@pytest.mark.parametrize("where", ["mapped", "positional", "remote"])
@pytest.mark.parametrize("state_dtype", list(STATE_DTYPES))
def test_batches_hold_the_samples_asked_for(
    tmp_path: Path, state_dtype: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _, _ = random_dataset(tmp_path / "data", samples=40, state_dtype=state_dtype)
    expected = list(HiddenStates(folder, "train"))
    if where == "positional":
        monkeypatch.setattr(reader, "on_network", lambda path: True)
    states = HiddenStates(through_a_subtree(folder) if where == "remote" else folder, "train")
    rng = random.Random(state_dtype)
    groups = [rng.choices(range(len(states)), k=rng.randint(1, 7)) for _ in range(25)]
    seen = 0
    for group, batch in zip(groups, states.batches(iter(groups), ahead=3, threads=3), strict=True):
        assert len(batch) == len(group)
        assert all(equal(sample, expected[i]) for sample, i in zip(batch, group, strict=True))
        seen += 1
    assert seen == 25
    assert all(equal(states[i], expected[i]) for i in range(len(states)))


def test_batches_use_their_buffers_again(tmp_path: Path) -> None:
    folder, _, _ = random_dataset(tmp_path, samples=40)
    states = HiddenStates(folder, "train")
    longest = max(range(len(states)), key=lambda i: states.lengths()[i])
    groups = [[longest] * 4] * 3 + [[i] for i in range(len(states))] * 3
    addresses = {batch[0].aux.data_ptr() // 4096 for batch in states.batches(groups, ahead=2)}
    assert len(addresses) <= 2 * 3  # three buffers, a page or two each
    assert list(states.batches([])) == []


@pytest.mark.parametrize("world", [1, 2, 3, 50])
def test_ranks_together_see_each_sample_once(tmp_path: Path, world: int) -> None:
    folder, _, _ = random_dataset(tmp_path, samples=40)
    states = HiddenStates(folder, "train")
    parts = [states.shard(rank, world) for rank in range(world)]
    assert sorted(s.sample_id for part in parts for s in part) == sorted(s.sample_id for s in states)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert [s.sample_id for s in parts[-1]] == [states[i].sample_id for i in range(world - 1, len(states), world)]


def test_the_order_by_id_does_not_depend_on_the_units(tmp_path: Path) -> None:
    folder, _, written = random_dataset(tmp_path, samples=40)
    ordered = HiddenStates(folder, "train").by_id()
    names = [s.sample_id for s in ordered]
    assert names == sorted(s.sample_id for s in HiddenStates(folder, "train")) and len(names) > 5
    assert all(equal(s, written[s.sample_id]) for s in ordered)
    assert ordered.lengths() == [len(written[name].input_ids) for name in names]


def test_few_files_are_open_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "OPEN_FILES", 2)
    folder, units, _ = random_dataset(tmp_path, samples=60)
    states = HiddenStates(folder, "train")
    kept = states[0]  # a view stays good after its file was closed
    read = [sample.sample_id for sample in states]
    assert sum(unit.split == "train" for unit in units) > 4
    opened = [link for link in Path("/proc/self/fd").iterdir() if str(link.resolve()).startswith(str(tmp_path))]
    assert len(opened) <= 2 * 2 + 1  # of each shard and its map, and the map under the view
    assert len(read) == len(states) and equal(kept, states[0])


def test_a_consumer_may_stop_early(tmp_path: Path) -> None:
    folder, _, _ = random_dataset(tmp_path, samples=40)
    states = HiddenStates(folder, "train")
    reading = states.batches([i] for i in list(range(len(states))) * 50)
    assert equal(next(reading)[0], states[0])
    reading.close()


def test_a_shard_that_is_cut_or_gone_is_said(tmp_path: Path) -> None:
    folder, _, _ = random_dataset(tmp_path)
    rows = HiddenStates(folder, "train").rows
    path = Path(folder.file(rows[0].file))
    whole = path.read_bytes()
    path.write_bytes(whole[: rows[0].record.start + 9])
    last = max(i for i, row in enumerate(rows) if row.file == rows[0].file)
    for read in (lambda s: s[last], lambda s: next(s.batches([[last]])), lambda s: s[0]):
        with pytest.raises(DatasetError, match=rf"{rows[0].file} cannot be read .*verify .*--repair"):
            read(HiddenStates(folder, "train"))
    path.unlink()
    with pytest.raises(DatasetError, match=rf"{rows[0].file} cannot be read .*No such file"):
        HiddenStates(folder, "train")[0]


@pytest.mark.parametrize("state_dtype", list(STATE_DTYPES))
def test_bytes_that_changed_are_a_sample_or_are_said(tmp_path: Path, state_dtype: str) -> None:
    """What Arrow says of a row's layout is data, too: nothing else may come of it, nor the process end."""
    folder, _, written = random_dataset(tmp_path, samples=20, state_dtype=state_dtype)
    states, rng = HiddenStates(folder, "train"), random.Random(state_dtype)
    outcomes = {"a sample": 0, "said": 0}
    for _ in range(400):
        at = rng.randrange(len(states))
        record = states.rows[at].record
        path = Path(folder.file(states.rows[at].file))
        whole = path.read_bytes()
        changed = bytearray(whole)
        for _ in range(rng.choice([1, 3])):
            changed[record.start + rng.randrange(min(record.bytes, 1500))] ^= 1 << rng.randrange(8)
        path.write_bytes(changed)
        try:
            sample = HiddenStates(folder, "train")[at] if rng.random() < 0.1 else next(states.batches([[at]]))[0]
            for value in vars(sample).values():
                if isinstance(value, torch.Tensor):
                    value.clone()  # all of it can be read
            outcomes["a sample"] += 1
        except DatasetError as error:
            assert f"{states.rows[at].file} cannot be read" in str(error) and record.sample_id in str(error)
            outcomes["said"] += 1
        path.write_bytes(whole)
    assert min(outcomes.values()) > 40
    assert all(equal(sample, written[sample.sample_id]) for sample in states)


def test_a_single_sample_can_be_checked(tmp_path: Path) -> None:
    folder, _, _ = random_dataset(tmp_path)
    states = HiddenStates(folder, "train")
    row = states.rows[1]
    for i in range(len(states)):
        states.check(i)
    data = bytearray(Path(folder.file(row.file)).read_bytes())
    data[row.record.start + row.record.bytes - 70] ^= 1
    Path(folder.file(row.file)).write_bytes(data)
    with pytest.raises(DatasetError, match=rf"sample {row.record.sample_id}: checksum"):
        HiddenStates(folder, "train").check(1)


def test_network_filesystems_are_told_by_the_mount_that_holds_the_file() -> None:
    mounts = (
        "/dev/vda / ext4 rw 0 0\nserver:/x /data nfs4 rw 0 0\n/dev/vdb /data/local xfs rw 0 0\n"
        "s3 /mnt/my\\040bucket fuse.s3fs rw 0 0\n"
    )
    for path, network in [
        ("/home/a", False),
        ("/data/a/b", True),
        ("/data/local/a", False),
        ("/database/a", False),
        ("/mnt/my bucket/a", True),
    ]:
        assert on_network(Path(path), mounts) == network, path


def test_rows_of_another_run_are_read_where_they_are(tmp_path: Path) -> None:
    lender, units, written = random_dataset(tmp_path / "lender" / "hidden_states", samples=30)
    plan = read_plan(lender)
    lent = lent_rows([str(tmp_path / "lender")], plan)
    assert lent.keys() == written.keys()
    # another split of the same samples: a unit borrows from one of the lender's
    rows = [sample for unit in units for sample in unit.samples]
    mine = [
        Unit(i, ("train", "held_out")[i % 2], tuple(s for s in rows if lent[s.sample_id] == shard), shard)
        for i, shard in enumerate(sorted(set(lent.values())))
    ]
    folder = Folder.at(tmp_path / "mine")
    with DatasetWriter(folder, make_plan(mine, hidden=8, vocab=50)) as writer:
        for unit in mine:
            writer.commit(borrowed(unit))
    assert verify(folder) == []
    read = [s for split in ("train", "held_out") for s in HiddenStates(folder, split)]
    assert len(read) == len(written) and all(equal(s, written[s.sample_id]) for s in read)
    assert not [name for name in folder.names() if name.endswith(".arrow")]
    # the lender repairs a unit: its shard has a new name, and is borrowed again
    was = borrowed(mine[0]).file
    discard(lender, {int(Path(mine[0].lender or "").stem.removeprefix("unit-"))})
    with DatasetWriter(lender, plan) as writer:
        [index] = set(range(len(units))) - writer.records.keys()
        again = [written[s.sample_id] for s in units[index].samples]
        writer.commit(write_shard(lender, units[index], again, 8, "bfloat16"))
    faults = verify(folder)
    assert faults and all(was in fault.message for fault in faults)
    with pytest.raises(DatasetError, match=rf"{was} cannot be read.*verify {folder.path} --repair"):
        list(HiddenStates(folder, mine[0].split))
    discard(folder, {fault.unit for fault in faults})
    with DatasetWriter(folder, read_plan(folder)) as writer:
        writer.commit(borrowed(mine[0]))
    assert verify(folder) == []
    # a borrower lends what it borrowed
    third = [unit for unit in mine if unit.split == "train"][:1]
    via = lent_rows([str(folder.path)], plan)
    chained = Unit(0, "train", third[0].samples, via[third[0].samples[0].sample_id])
    assert borrowed(chained).file == borrowed(third[0]).file
    Path(mine[0].lender or "").unlink()
    with pytest.raises(DatasetError, match=r"was to lend .*extract\.share"):
        borrowed(mine[0])


def borrower(path: Path, units: list[Unit], lender: Folder) -> Folder:
    """A dataset of the same units, every row of which is borrowed."""
    lent = [replace(unit, lender=lender.place(record_name(unit.index))) for unit in units]
    folder = Folder.at(path)
    with DatasetWriter(folder, make_plan(lent, hidden=8, vocab=50)) as writer:
        for unit in lent:
            writer.commit(borrowed(unit))
    return folder


def borrow_again(folder: Folder, units: list[Unit], lender: Folder, faults: list[Fault]) -> None:
    discard(folder, {fault.unit for fault in faults})
    with DatasetWriter(folder, read_plan(folder)) as writer:
        for unit in {fault.unit for fault in faults}:
            writer.commit(borrowed(replace(units[unit], lender=lender.place(record_name(unit)))))


def test_damage_to_what_is_borrowed_is_repaired_where_it_lies(tmp_path: Path) -> None:
    """The third borrows from the second, which borrows from the first: each is sent to its own lender until that is whole."""
    first, units, written = random_dataset(tmp_path / "first")
    second = borrower(tmp_path / "second", units, first)
    third = borrower(tmp_path / "third", units, second)
    row = HiddenStates(second, "train").rows[0]
    path = Path(row.file)
    data = bytearray(path.read_bytes())
    data[row.record.start + row.record.bytes - 70] ^= 1
    path.write_bytes(data)
    for folder, lender in ((second, first), (third, second)):
        [fault] = verify(folder)
        way_out = rf"verify {lender.path} --repair.*extract.*first, then .*verify {folder.path} --repair.*extract"
        assert fault.lent and str(path) in fault.message and re.search(way_out, fault.message)
        with pytest.raises(DatasetError, match=rf"checksum .*{way_out}"):
            HiddenStates(folder, "train").check(0)
        borrow_again(folder, units, lender, [fault])
        assert verify(folder) == [fault], "borrowing the same bytes again repairs nothing"
    discard(first, {fault.unit for fault in verify(first) if not fault.lent})
    assert all(fault.lent for fault in verify(second)), "nothing can be borrowed yet"
    with DatasetWriter(first, read_plan(first)) as writer:
        [index] = set(range(len(units))) - writer.records.keys()
        writer.commit(
            write_shard(first, units[index], [written[s.sample_id] for s in units[index].samples], 8, "bfloat16")
        )
    for folder, lender in ((second, first), (third, second)):
        with pytest.raises(DatasetError, match=rf"cannot be read.*verify {lender.path} --repair"):
            HiddenStates(folder, "train")[0]
        faults = verify(folder)
        assert faults and not any(fault.lent for fault in faults)
        borrow_again(folder, units, lender, faults)
        assert verify(folder) == []


def test_places_in_an_object_store_keep_their_options() -> None:
    class Store(pafs.SubTreeFileSystem):
        pass

    store = Store("/", pafs.LocalFileSystem())
    folder = Folder(store, "bucket/run", "s3://bucket/run?region=x").folder("hidden_states")
    assert folder.path == "bucket/run/hidden_states"
    assert folder.place("unit-1.json") == "s3://bucket/run/hidden_states/unit-1.json?region=x"
    assert Folder.at("/data/run").folder("a").place("b") == "/data/run/a/b"
    assert Folder.at("file:///data/run").folder("a").place("b") == "file:///data/run/a/b"


def test_a_link_to_a_network_filesystem_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Path] = []
    random_dataset(tmp_path / "real")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    monkeypatch.setattr(reader, "on_network", lambda path: asked.append(path))
    assert HiddenStates(Folder.at(tmp_path / "link"), "train")[0]
    assert asked and all(path.is_relative_to(tmp_path / "real") for path in asked)


def test_a_run_that_captured_otherwise_cannot_lend(tmp_path: Path) -> None:
    lender, _, _ = random_dataset(tmp_path)
    plan = read_plan(lender).model_copy(update={"aux_layers": (0, 1, 2), "target": {"config": "other"}})
    with pytest.raises(DatasetError, match=r"cannot lend.*aux_layers is \(1, 3, 4\) there.*the target's config differ"):
        lent_rows([lender.path], plan)


def test_states_in_8_bits_train_as_numbers(tmp_path: Path) -> None:
    from ray_eagle.training.packing import make_pack

    folder, _, _ = random_dataset(tmp_path, samples=20, state_dtype="float8")
    samples = list(HiddenStates(folder, "train"))[:5]
    pack = make_pack(samples, 2).to(torch.device("cpu"), torch.float32)
    assert torch.equal(pack.aux_TC, torch.cat([s.aux_states(torch.float32) for s in samples]))
    assert pack.aux_scale_TG is None
