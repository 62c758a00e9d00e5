"""Packs: their indices, and packs read for a training run, the same whether a thread makes them aside or not."""

import dataclasses
import random
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from ray_eagle.errors import DatasetError
from ray_eagle.hidden_states.reader import HiddenStates
from ray_eagle.hidden_states.schema import Sample
from ray_eagle.training import packing
from ray_eagle.training.packing import Pack, make_pack, read_packs
from tests.random_data import random_dataset
from tests.slow_unroll import counts


def equal(one: Any, other: Any) -> bool:
    """Of packs, and all that they hold."""
    if dataclasses.is_dataclass(one):
        return all(equal(getattr(one, f.name), getattr(other, f.name)) for f in dataclasses.fields(one))
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


def threads() -> int:
    return sum(thread.name.startswith("eagle-") for thread in threading.enumerate())


def random_samples(rng: random.Random) -> list[Sample]:
    """Documents with any masks: also of one token, without an assistant's token, or of nothing else."""
    samples = []
    for i in range(rng.randint(1, 9)):
        share = rng.choice([0.0, 0.5, 0.9, 1.0])
        mask = torch.tensor([rng.random() < share for _ in range(rng.randint(1, 25))]).byte()
        rows = int(mask[1:].sum())
        tokens, top1 = torch.randint(0, 50, (len(mask),)).int(), torch.randint(0, 50, (rows,)).int()
        aux, last = torch.randn(len(mask), 6).bfloat16(), torch.randn(rows, 2).bfloat16()
        samples.append(Sample(f"{i}", "", tokens, mask, aux, last, top1, torch.zeros(rows)))
    return samples


@pytest.mark.parametrize("everywhere", [False, True])
def test_indices_are_those_of_loops_over_documents_and_positions(
    everywhere: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "BLOCK", 4)
    rng, steps = random.Random(everywhere), 3
    for _ in range(100):
        samples = random_samples(rng)
        pack = make_pack(samples, steps, everywhere=everywhere)
        masks = [sample.loss_mask.tolist() for sample in samples]
        places = [(d, t) for d, mask in enumerate(masks) for t in range(len(mask))]
        teachers = [(d, s) for d, s in places if masks[d][s + 1 : s + 2] == [1]]
        computed = [
            [(d, t) for d, t in places if (t + 1 + k < len(masks[d]) if everywhere else counts(masks[d], t, k))]
            for k in range(steps)
        ]
        firsts = [min((t for d, t in computed[0] if d == i), default=len(mask)) for i, mask in enumerate(masks)]
        slots = [(d, t) for d, t in places if t >= firsts[d]]
        assert pack.positions_T.tolist() == [t for _, t in places]
        assert pack.tokens_T.tolist() == [token for sample in samples for token in sample.input_ids.tolist()]
        assert pack.top1_S.tolist() == [token for sample in samples for token in sample.top1.tolist()]
        for k, step in enumerate(pack.steps):
            scored = [(d, t) for d, t in computed[k] if counts(masks[d], t, k)]
            assert step.at_N.tolist() == [places.index(p) for p in computed[k]]
            assert step.kept_N.tolist() == [(computed[k - 1] if k else places).index(p) for p in computed[k]]
            assert step.first_N.tolist() == [computed[0].index(p) for p in computed[k]]
            assert step.slot_N.tolist() == [slots.index(p) for p in computed[k]]
            assert step.token_N.tolist() == [int(samples[d].input_ids[t + 1 + k]) for d, t in computed[k]]
            assert step.position_N.tolist() == [t + k for _, t in computed[k]]
            assert step.scored_M.tolist() == [computed[k].index(p) for p in scored]
            rows = [teachers.index((d, t + 1 + k)) for d, t in scored]
            assert step.teacher_M.tolist() == rows
            assert step.blocks == tuple(
                sum(row < edge for row in rows) for edge in [*range(0, len(teachers), 4), len(teachers)]
            )
        queries, keys = [0], [0]
        for d, mask in enumerate(masks):
            queries.append(queries[-1] + len(mask) - firsts[d])
            keys.append(keys[-1] + len(mask))
        spans = pack.spans
        assert spans.bounds == tuple(zip(queries, queries[1:], keys, keys[1:], strict=False))
        assert (spans.queries_B1.tolist(), spans.keys_B1.tolist()) == (queries, keys)
        assert spans.longest_queries == max(len(m) - f for m, f in zip(masks, firsts, strict=True))
        assert spans.longest_keys == max(map(len, masks))


@pytest.mark.parametrize("everywhere", [False, True])
def test_rows_come_in_multiples_and_the_documents_stay_what_they_are(everywhere: bool) -> None:
    rng = random.Random(everywhere)
    for _ in range(100):
        samples, steps, multiple = random_samples(rng), rng.randint(1, 5), rng.choice([2, 3, 16])
        plain = make_pack(samples, steps, everywhere=everywhere)
        pack = make_pack(samples, steps, everywhere=everywhere, multiple=multiple)
        tokens = len(plain.tokens_T)
        assert len(pack.tokens_T) % multiple == 0 and len(pack.aux_TC) == len(pack.positions_T) == len(pack.tokens_T)
        assert equal(pack.aux_TC[:tokens], plain.aux_TC) and not pack.aux_TC[tokens:].any()
        for own, filled in zip(plain.steps, pack.steps, strict=True):
            real = len(own.at_N)
            assert len(filled.at_N) % multiple == 0 and bool((filled.at_N[real:] >= tokens).all())
            for field in ("at_N", "first_N", "slot_N", "token_N", "position_N"):
                assert torch.equal(getattr(filled, field)[:real], getattr(own, field)), field
            assert (filled.position_N < len(pack.tokens_T)).all() and filled.at_N.unique().equal(filled.at_N)
            assert torch.equal(filled.scored_M, own.scored_M) and torch.equal(filled.teacher_M, own.teacher_M)
            assert filled.blocks == own.blocks
        assert pack.spans.bounds[: len(samples)] == plain.spans.bounds and pack.names == plain.names


@pytest.mark.parametrize("aside", [False, True])
@pytest.mark.parametrize("everywhere", [False, True])
def test_packs_are_those_of_their_samples_in_order(tmp_path: Path, aside: bool, everywhere: bool) -> None:
    states = HiddenStates(random_dataset(tmp_path, samples=40)[0], "train")
    samples, rng = list(states), random.Random(aside)
    groups = [rng.choices(range(len(states)), k=rng.randint(1, 7)) for _ in range(25)]
    read = read_packs(states, groups, 3, everywhere=everywhere, aside=aside)
    for group, pack in zip(groups, read, strict=True):
        assert equal(pack, make_pack([samples[i] for i in group], 3, everywhere=everywhere))
    assert not threads()


@pytest.mark.parametrize("aside", [False, True])
def test_a_reading_that_is_left_ends(tmp_path: Path, aside: bool) -> None:
    states = HiddenStates(random_dataset(tmp_path, samples=40)[0], "train")
    read = read_packs(states, [[i] for i in range(len(states))], 2, aside=aside)
    assert isinstance(next(read), Pack) and threads()
    read.close()
    assert not threads()


@pytest.mark.parametrize("aside", [False, True])
def test_a_shard_that_is_cut_off_is_said_where_its_pack_would_come(tmp_path: Path, aside: bool) -> None:
    folder = random_dataset(tmp_path, samples=40)[0]
    states = HiddenStates(folder, "train")
    last = states.rows[-1]
    damaged = Path(folder.file(last.file))
    kept = [i for i, row in enumerate(states.rows) if row.file != last.file]
    damaged.write_bytes(damaged.read_bytes()[: last.record.start + 10])
    read = read_packs(states, [kept[:2], kept[2:4], [len(states) - 1]], 2, aside=aside)
    assert len(next(read).names) == len(next(read).names) == 2
    with pytest.raises(DatasetError, match="cannot be read"):
        next(read)
