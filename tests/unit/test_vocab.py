"""The vocabulary map: which tokens, in which form, how much of the text they cover; and how a drafter starts with it."""

import random
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from ray_eagle.config import Config, DrafterConfig, TargetConfig
from ray_eagle.drafter.checkpoint import load_drafter, save_drafter
from ray_eagle.drafter.start import move_rows, new_shape, random_drafter, start_drafter
from ray_eagle.errors import CheckpointError, InputError
from ray_eagle.hidden_states.dataset import DatasetWriter, read_plan, read_records, record_name
from ray_eagle.hidden_states.plan import Quarantined, TokenSample, Unit, plan_units
from ray_eagle.hidden_states.schema import Sample, sample_id
from ray_eagle.progress import Silent
from ray_eagle.run import Folder, RunFolder
from ray_eagle.target.loading import head_and_embedding, read_facts
from ray_eagle.vocab import choose_tokens, coverage, read_map, supervised_counts, to_map, vocab
from tests.random_data import make_plan, write_shard
from tests.tiny import VOCAB, tiny_drafter, tiny_shape, tiny_tokenizer

HIDDEN = 32
EOS = tiny_tokenizer().eos_token_id
USER = tiny_tokenizer().convert_tokens_to_ids("<|user|>")


@dataclass
class Row:
    split: Any
    ids: list[int]
    mask: list[int]
    top1: list[int]


def random_rows(seed: int, tokens: list[int], count: int = 24) -> list[Row]:
    """Samples of every split; the other splits say tokens that the training split never does."""
    rng = random.Random(seed)
    rows = []
    for i in range(count):
        split = ("train", "train", "validation", "held_out")[i % 4]
        said = tokens if split == "train" else range(VOCAB)
        ids = [rng.choice(said) for _ in range(rng.randint(2, 30))]
        mask = [int(rng.random() < 0.6) for _ in ids]
        mask[-1] = 1
        rows.append(Row(split, ids, mask, [rng.choice(tokens) for _ in range(sum(mask[1:]))]))
    return rows


def write_dataset(folder: Folder, rows: list[Row]) -> None:
    """Commit the rows with random states, in small units."""
    named = {sample_id(row.ids, row.mask): row for row in rows}
    samples = [TokenSample(n, n, row.split, tuple(row.ids), tuple(row.mask)) for n, row in named.items()]
    units = plan_units(samples, unit_bytes=20_000, hidden_size=HIDDEN, state_dtype="bfloat16", seed=0)
    assert len(units) > 3
    plan = make_plan(units, hidden=HIDDEN, vocab=VOCAB)
    with DatasetWriter(folder, plan) as writer:
        for unit in units:
            states = [
                Sample(
                    s.sample_id,
                    s.source_id,
                    torch.tensor(s.input_ids, dtype=torch.int32),
                    torch.tensor(s.loss_mask, dtype=torch.uint8),
                    torch.randn(len(s.input_ids), 3 * HIDDEN, dtype=torch.bfloat16),
                    torch.randn(s.teaching, HIDDEN, dtype=torch.bfloat16),
                    torch.tensor(named[s.sample_id].top1, dtype=torch.int32),
                    torch.randn(s.teaching),
                )
                for s in unit.samples
            ]
            writer.commit(write_shard(folder, unit, states, HIDDEN, "bfloat16"))


def slow_choice(counts: list[int], size: int, always: list[int]) -> list[int]:
    """Take the best token that is left, again and again."""
    left, chosen = list(range(len(counts))), []
    while left and len(chosen) < size:
        best = left[0]
        for token in left:
            kept, best_kept = token in always, best in always
            if (kept and not best_kept) or (kept == best_kept and not kept and counts[token] > counts[best]):
                best = token
        left.remove(best)
        chosen.append(best)
    return sorted(chosen)


# --- the choice -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(40))
def test_choice_map_and_coverage_equal_the_slow_way(seed: int) -> None:
    rng = random.Random(seed)
    size_v = rng.randint(1, 60)
    counts = [rng.choice([0, 0, 1, 2, 2, 3, rng.randint(0, 10**12)]) for _ in range(size_v)]
    always = rng.sample(range(size_v), rng.randint(0, min(4, size_v)))
    size = rng.randint(1, size_v + 5)
    counts_V = np.array(counts, dtype=np.int64)
    before = counts_V.copy()
    ids_D = choose_tokens(counts_V, size, always)
    assert np.array_equal(counts_V, before)
    assert ids_D.dtype == np.int64
    assert ids_D.tolist() == slow_choice(counts, size, always)

    d2t, t2d = to_map(ids_D, size_v)
    assert (d2t.dtype, t2d.dtype, len(t2d)) == (torch.int64, torch.bool, size_v)
    assert [i + int(offset) for i, offset in enumerate(d2t)] == ids_D.tolist()
    assert [v for v in range(size_v) if t2d[v]] == ids_D.tolist()

    inside = sum(counts[v] for v in ids_D.tolist())
    assert coverage(counts_V, ids_D) == (pytest.approx(inside / sum(counts)) if sum(counts) else 0.0)


@pytest.mark.parametrize(
    ("counts", "size", "always", "expected"),
    [
        ([0, 5, 0, 9, 0, 0], 4, [], [0, 1, 2, 3]),  # fewer distinct tokens than D: the lowest unused ids
        ([0, 5, 0, 9, 0, 0], 4, [5], [0, 1, 3, 5]),
        ([0, 5, 0, 9, 0, 0], 2, [5], [3, 5]),  # kept though it never occurs
        ([2, 2, 2, 2], 2, [], [0, 1]),  # ties: the lower id
        ([1, 2, 3], 3, [], [0, 1, 2]),
        ([1, 2, 3], 99, [], [0, 1, 2]),  # D >= V: all of it
        ([0, 0, 0], 2, [], [0, 1]),
    ],
)
def test_choice(counts: list[int], size: int, always: list[int], expected: list[int]) -> None:
    assert choose_tokens(np.array(counts), size, always).tolist() == expected


# --- the stage ------------------------------------------------------------------------------------------------------


def run_stage(tmp_path: Path, target: Path, rows: list[Row], **settings: Any) -> tuple[RunFolder, dict[str, Any]]:
    run = RunFolder.open(str(tmp_path / "run"))
    write_dataset(run.of("extract"), rows)
    config = Config.model_validate({"target": {"path": str(target), "aux_layers": [1, 3, 4]}, **settings})
    outcome = vocab(config, run, read_facts(config.target), Silent())
    found = run.of("vocab").read_json("vocab.json")
    assert outcome.samples == found["size"]
    assert outcome.tokens == found["supervised_tokens"]
    return run, found


def supervised(rows: list[Row]) -> Counter[int]:
    """Tokens that the assistant wrote and some position before them predicts, training split alone."""
    counts: Counter[int] = Counter()
    for row in rows:
        for t in range(1, len(row.ids)):
            if row.split == "train" and row.mask[t]:
                counts[row.ids[t]] += 1
    return counts


@pytest.mark.parametrize("size", [20, 60, VOCAB, 32000])
def test_stage_maps_the_supervised_tokens_of_the_training_split(tmp_path: Path, target_folder: Path, size: int) -> None:
    tokens = [7, 9, 200, EOS, USER, *range(40, 80)]
    rows = random_rows(3, tokens)
    counts, teacher = supervised(rows), Counter(t for row in rows if row.split == "train" for t in row.top1)
    always = [t for t in (EOS, USER) if counts[t] or t == EOS]
    run, found = run_stage(tmp_path, target_folder, rows, vocab={"size": size, "report_sizes": [5, 30, 10**6]})

    d2t, t2d = read_map(run.of("vocab"))
    expected = slow_choice([counts[v] for v in range(VOCAB)], size, always)
    assert len(expected) == min(size, VOCAB)
    assert [i + int(offset) for i, offset in enumerate(d2t)] == expected
    assert t2d.nonzero().flatten().tolist() == expected
    assert EOS in expected
    files = load_file(run.of("vocab").file("vocab.safetensors"))
    assert (files["d2t"].dtype, files["t2d"].dtype) == (torch.int64, torch.bool)

    assert [row["size"] for row in found["table"]] == sorted({5, 30, len(expected)})
    for row in found["table"]:
        inside = slow_choice([counts[v] for v in range(VOCAB)], row["size"], always)
        assert row["coverage"] == pytest.approx(sum(counts[v] for v in inside) / counts.total(), abs=1e-6)
        assert row["teacher_ceiling"] == pytest.approx(sum(teacher[v] for v in inside) / teacher.total(), abs=1e-6)
    assert found["distinct_supervised_tokens"] == len(counts)
    assert found["supervised_tokens"] == counts.total()
    assert sorted(found["always_kept"]) == sorted(always)


def test_end_of_turn_and_the_specials_that_were_said_are_kept_in_the_smallest_map(
    tmp_path: Path, target_folder: Path
) -> None:
    rows = [row for seed in range(4) for row in random_rows(seed, [50, 51, 52])]
    rows += [Row("train", [50, USER], [0, 1], [50])]
    run, _ = run_stage(tmp_path, target_folder, rows, vocab={"size": 3})
    d2t, _ = read_map(run.of("vocab"))
    ids = (torch.arange(3) + d2t).tolist()
    assert {EOS, USER} < set(ids)
    assert set(ids) - {EOS, USER} <= {50, 51, 52}


def test_a_dataset_that_teaches_nothing_is_refused(tmp_path: Path, target_folder: Path) -> None:
    rows = [row for seed in range(4) for row in random_rows(seed, [50]) if row.split != "train"]
    with pytest.raises(InputError, match="expected supervised tokens in the training split, found none"):
        run_stage(tmp_path, target_folder, rows)


def test_a_unit_whose_samples_were_all_set_aside_adds_nothing(tmp_path: Path) -> None:
    rows = random_rows(5, list(range(60, 90)))
    write_dataset(Folder.at(tmp_path / "whole"), rows)
    folder = Folder.at(tmp_path / "less")
    write_dataset(folder, rows)
    plan = read_plan(folder)
    gone = next(i for i, unit in enumerate(plan.units) if unit.split == "train")
    record = read_records(folder, plan)[gone]
    none = write_shard(folder, Unit(gone, "train", ()), [], HIDDEN, "bfloat16")
    none.quarantined = [Quarantined(sample_id=r.sample_id, source_id="s", reason="NaN") for r in record.rows]
    folder.delete_file(record_name(gone))
    with DatasetWriter(folder, plan) as writer:
        writer.commit(none)
    lost = np.zeros(VOCAB, np.int64)
    lost[record.token_ids] = record.token_counts
    whole = supervised_counts(Folder.at(tmp_path / "whole"), VOCAB)
    assert lost.any() and (supervised_counts(folder, VOCAB) == whole - lost).all()


def test_a_given_drafter_keeps_its_map(tmp_path: Path, target_folder: Path) -> None:
    given = tiny_drafter(tiny_shape(draft_vocab=50), seed=6)
    save_drafter(given, tmp_path / "given")
    rows = random_rows(5, [70, 71, 72])
    drafter = {"path": str(tmp_path / "given")}
    run, found = run_stage(tmp_path, target_folder, rows, drafter=drafter, vocab={"size": 20})
    d2t, t2d = read_map(run.of("vocab"))
    assert torch.equal(d2t, given.d2t)
    assert torch.equal(t2d, given.t2d)
    assert (found["size"], found["source"]) == (50, "given drafter")
    counts = supervised(rows)
    share = sum(n for token, n in counts.items() if given.t2d[token]) / counts.total()
    assert {row["size"]: row["coverage"] for row in found["table"]}[50] == pytest.approx(share, abs=1e-6)


@pytest.mark.parametrize("shape", [{"vocab": VOCAB + 40}, {"hidden": 16}, {"aux_layers": (1, 3, 8)}])
def test_a_given_drafter_of_another_target_is_refused(
    tmp_path: Path, target_folder: Path, shape: dict[str, Any]
) -> None:
    save_drafter(tiny_drafter(tiny_shape(**shape)), tmp_path / "given")
    with pytest.raises(CheckpointError, match="drafter for another target"):
        run_stage(tmp_path, target_folder, random_rows(5, [70]), drafter={"path": str(tmp_path / "given")})


# --- how a drafter starts with it -----------------------------------------------------------------------------------


def test_a_new_drafter_starts_with_the_targets_head_rows(target_folder: Path) -> None:
    facts = read_facts(TargetConfig(path=str(target_folder)))
    like = tiny_drafter(tiny_shape(), seed=5)
    drafter = start_drafter(DrafterConfig(), facts, like.d2t, like.t2d, seed=1)
    head, _, norm = head_and_embedding(facts)
    for i in range(len(like.d2t)):
        assert torch.equal(drafter.lm_head.weight[i], head[i + int(like.d2t[i])])
    assert torch.equal(drafter.norm.weight, norm)
    assert torch.equal(drafter.t2d, like.t2d)
    assert drafter.shape.hidden_size == facts.hidden_size
    assert drafter.shape.max_position_embeddings == facts.max_position_embeddings
    other = start_drafter(DrafterConfig(initial="random"), facts, like.d2t, like.t2d, seed=1)
    assert torch.equal(other.fc.weight, drafter.fc.weight)
    assert not torch.equal(other.lm_head.weight, drafter.lm_head.weight)
    assert not torch.equal(
        start_drafter(DrafterConfig(), facts, like.d2t, like.t2d, seed=2).fc.weight, drafter.fc.weight
    )


def test_the_shape_of_a_new_drafter_is_the_targets_but_for_what_the_settings_say(target_folder: Path) -> None:
    facts = read_facts(TargetConfig(path=str(target_folder)))
    shape = new_shape(DrafterConfig(head_dim=4, intermediate_size=7), facts, 10**6)
    assert (shape.head_dim, shape.intermediate_size, shape.num_attention_heads) == (4, 7, facts.num_attention_heads)
    assert (shape.draft_vocab_size, shape.aux_layers) == (VOCAB, facts.aux_layers)
    drafter = random_drafter(shape, seed=3)
    assert torch.equal(drafter.target_ids, torch.arange(VOCAB))


def test_training_starts_from_the_given_weights_and_map_or_refuses(target_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "given"
    save_drafter(tiny_drafter(tiny_shape()), folder)
    facts = read_facts(TargetConfig(path=str(target_folder), aux_layers=(1, 3, 4)))
    given = load_drafter(folder)
    start = start_drafter(DrafterConfig(path=str(folder)), facts, given.d2t, given.t2d, seed=1)
    for name, tensor in given.state_dict().items():
        assert torch.equal(start.state_dict()[name], tensor)
    other = tiny_drafter(tiny_shape(), seed=8)
    with pytest.raises(CheckpointError, match="expected the vocabulary map of the run, found another one"):
        start_drafter(DrafterConfig(path=str(folder)), facts, other.d2t, other.t2d, seed=1)
    facts = read_facts(TargetConfig(path=str(target_folder), aux_layers=(1, 3, 5)))
    with pytest.raises(CheckpointError, match=r"Set target.aux_layers to \[1, 3, 4\]"):
        start_drafter(DrafterConfig(path=str(folder)), facts, given.d2t, given.t2d, seed=1)


# --- another map for a drafter that has learnt ----------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_head_rows_move_with_their_tokens(seed: int) -> None:
    rng = random.Random(seed)
    vocabulary, new_size = 60, rng.randint(1, 60)
    drafter = tiny_drafter(tiny_shape(vocab=vocabulary, draft_vocab=rng.randint(1, 60)), seed=seed)
    head_VH = torch.randn(vocabulary, HIDDEN, generator=torch.Generator().manual_seed(seed)).bfloat16()
    d2t, t2d = to_map(np.array(sorted(rng.sample(range(vocabulary), new_size))), vocabulary)
    before = {name: tensor.clone() for name, tensor in drafter.state_dict().items()}
    row_of = {int(offset) + i: drafter.lm_head.weight[i] for i, offset in enumerate(drafter.d2t)}

    moved = move_rows(drafter, d2t, t2d, head_VH)

    assert all(torch.equal(tensor, before[name]) for name, tensor in drafter.state_dict().items())
    assert moved.shape == drafter.shape.model_copy(update={"draft_vocab_size": new_size})
    assert torch.equal(moved.d2t, d2t) and torch.equal(moved.t2d, t2d)
    for i, offset in enumerate(d2t):
        token = i + int(offset)
        expected = row_of[token] if token in row_of else head_VH[token].float()
        assert torch.equal(moved.lm_head.weight[i], expected), token
    for name in before.keys() - {"lm_head.weight", "d2t", "t2d"}:
        assert torch.equal(moved.state_dict()[name], before[name]), name

    common = sorted(row_of.keys() & set(moved.target_ids.tolist()))
    outputs_NH = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(seed + 1))
    said = [drafter.logits(outputs_NH)[:, (drafter.target_ids == token).nonzero()[0, 0]] for token in common]
    says = [moved.logits(outputs_NH)[:, (moved.target_ids == token).nonzero()[0, 0]] for token in common]
    for one, other in zip(said, says, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


def test_a_new_map_for_a_given_drafter_is_chosen_and_its_rows_move(tmp_path: Path, target_folder: Path) -> None:
    given = tiny_drafter(tiny_shape(draft_vocab=50), seed=6)
    save_drafter(given, tmp_path / "given", torch.float32)
    rows = random_rows(5, [70, 71, 72, 73])
    settings = {"drafter": {"path": str(tmp_path / "given")}, "vocab": {"size": 20, "keep_given": False}}
    run, found = run_stage(tmp_path, target_folder, rows, **settings)
    assert (found["size"], found["source"]) == (20, "supervised tokens of the training split")
    d2t, t2d = read_map(run.of("vocab"))
    assert t2d[[70, 71, 72, 73]].all()

    facts = read_facts(TargetConfig(path=str(target_folder), aux_layers=(1, 3, 4)))
    drafter = DrafterConfig(path=str(tmp_path / "given"))
    start = start_drafter(drafter, facts, d2t, t2d, seed=1, reindex=True)
    head = head_and_embedding(facts)[0]
    given_row = dict(zip(given.target_ids.tolist(), given.lm_head.weight, strict=True))
    for i, token in enumerate(start.target_ids.tolist()):
        assert torch.equal(start.lm_head.weight[i], given_row.get(token, head[token]))
    assert torch.equal(start.fc.weight, given.fc.weight)
    with pytest.raises(CheckpointError, match=r"vocab\.keep_given to false"):
        start_drafter(drafter, facts, d2t, t2d, seed=1)
    with pytest.raises(CheckpointError, match="two maps that disagree"):
        start_drafter(drafter, facts, d2t, t2d.roll(1), seed=1, reindex=True)
