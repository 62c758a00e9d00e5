"""Random samples and datasets, written through the product's own writer."""

from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

import torch

from ray_eagle.hidden_states.dataset import DatasetWriter
from ray_eagle.hidden_states.plan import DatasetPlan, TokenSample, Unit, plan_units
from ray_eagle.hidden_states.quantise import quantise
from ray_eagle.hidden_states.schema import STATE_DTYPES, Sample, sample_id
from ray_eagle.hidden_states.shard import ShardWriter, UnitRecord
from ray_eagle.run import Folder


def random_tokens(generator: torch.Generator, vocab: int, longest: int = 40) -> tuple[list[int], list[int]]:
    """Ids and a mask with one or more turns, always at least one supervised token that is predicted."""
    length = int(torch.randint(3, longest, (), generator=generator))
    mask = [0] * length
    at = int(torch.randint(1, 3, (), generator=generator))
    while at < length:
        turn = int(torch.randint(1, 12, (), generator=generator))
        mask[at : at + turn] = [1] * len(mask[at : at + turn])
        at += turn + int(torch.randint(1, 4, (), generator=generator))
    return torch.randint(0, vocab, (length,), generator=generator).tolist(), mask


def random_states(generator: torch.Generator, row: TokenSample, hidden: int, dtype: torch.dtype, vocab: int) -> Sample:
    """States for the tokens of a row, as `dtype` stores them."""

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    aux, scale = randn(len(row.input_ids), 3 * hidden), None
    last = randn(row.teaching, hidden).to(torch.float32 if dtype == torch.float32 else torch.bfloat16)
    if dtype == torch.float8_e4m3fn:
        values, scales = zip(*(quantise(layer) for layer in aux.chunk(3, 1)), strict=True)
        aux, scale = torch.cat([v.view(torch.uint8) for v in values], 1).view(dtype), torch.cat(scales, 1)
    return Sample(
        row.sample_id,
        row.source_id,
        torch.tensor(row.input_ids, dtype=torch.int32),
        torch.tensor(row.loss_mask, dtype=torch.uint8),
        aux.to(dtype),
        last,
        torch.randint(0, vocab, (row.teaching,), generator=generator).int(),
        randn(row.teaching),
        scale,
    )


def random_dataset(
    path: Path, *, samples: int = 20, hidden: int = 8, vocab: int = 50, seed: int = 0, state_dtype: str = "bfloat16"
) -> tuple[Folder, list[Unit], dict[str, Sample]]:
    """A committed dataset, its units, and what was written by sample_id."""
    generator = torch.Generator().manual_seed(seed)
    rows = {}
    for i in range(samples):
        ids, mask = random_tokens(generator, vocab)
        name = sample_id(ids, mask)
        rows[name] = TokenSample(
            name, f"s{i}", ("train", "validation", "held_out")[i % 5 // 2], tuple(ids), tuple(mask)
        )
    folder = Folder.at(path)
    units = plan_units(list(rows.values()), unit_bytes=6000, hidden_size=hidden, state_dtype=state_dtype, seed=seed)
    plan = make_plan(units, hidden=hidden, vocab=vocab, state_dtype=state_dtype)
    written: dict[str, Sample] = {}
    with DatasetWriter(folder, plan) as writer:
        for unit in units:
            states = [random_states(generator, row, hidden, STATE_DTYPES[state_dtype], vocab) for row in unit.samples]
            written |= {s.sample_id: s for s in states}
            writer.commit(write_shard(folder, unit, states, hidden, state_dtype))
    return folder, units, written


def make_plan(
    units: list[Unit], *, hidden: int, vocab: int, state_dtype: str = "bfloat16", seed: int = 0
) -> DatasetPlan:
    return DatasetPlan(
        aux_layers=(1, 3, 4),
        hidden_size=hidden,
        vocab_size=vocab,
        state_dtype=state_dtype,
        compute_dtype="float32",
        attention="sdpa",
        tokens_per_batch=64,
        seed=seed,
        target={"config": "c"},
        conversations="k",
        units=[unit.planned for unit in units],
        rejected=[],
    )


def write_shard(
    folder: Folder, unit: Unit, samples: Iterable[Sample], hidden_size: int, state_dtype: str
) -> UnitRecord:
    """Write one attempt at a unit to its end, sync it, and return the record that would commit it."""
    with closing(ShardWriter(folder, unit.index, hidden_size, state_dtype)) as writer:
        for sample in samples:
            writer.add(sample)
        return writer.finish()
