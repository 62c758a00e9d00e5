"""The plan of a dataset: samples of conversations, units and packs."""

import random
import sys

from ray_eagle.conversations.conversation import Conversation
from ray_eagle.hidden_states.plan import plan_packs, plan_units, tokenise
from tests.unit.test_hidden_states import SPLITS


def conversations(count: int) -> list[Conversation]:
    rng = random.Random(3)
    made = []
    for i in range(count):
        length = rng.randint(4, 60)
        start = rng.randint(1, length - 2)
        ids = [rng.randint(0, 40) for _ in range(length)]
        made.append(Conversation(f"s{i}", "chat", rng.choice(SPLITS), [], ids, [[start, length]], ["stop"]))
    return made


def test_every_conversation_is_a_sample_or_rejected_with_a_reason() -> None:
    rows = conversations(60)
    rows[3] = Conversation("s3", "chat", "train", [], [1, 2, 3], [], [])
    rows[4] = Conversation("s4", "chat", "train", [], rows[5].input_ids, rows[5].supervised, ["stop"])
    samples, rejected, cut = tokenise(rows, max_length=30)
    kept = {s.source_id for s in samples}
    assert kept | {r["source_id"] for r in rejected} == {c.source_id for c in rows}
    assert not kept & {r["source_id"] for r in rejected}
    reasons = {r["source_id"]: r["reason"] for r in rejected}
    assert "no supervised token" in reasons["s3"] and "same tokens as s4" in reasons["s5"]
    assert cut == sum(len(c.input_ids) > 30 for c in rows if c.source_id in kept)
    assert all(len(s.input_ids) <= 30 and len(s.input_ids) == len(s.loss_mask) for s in samples)
    whole = {s.source_id: ([*s.input_ids], [*s.loss_mask]) for s in tokenise(iter(rows), max_length=60)[0]}
    assert all(whole[c.source_id] == (c.input_ids, c.loss_mask) for c in rows if c.source_id in whole)


def test_the_driver_holds_five_bytes_a_token() -> None:
    row = Conversation("s", "chat", "train", [], [*range(100_000)], [[5, 100_000]], ["stop"])
    [sample], _, _ = tokenise([row], max_length=100_000)
    assert sys.getsizeof(sample.input_ids) + sys.getsizeof(sample.loss_mask) < 5.1 * 100_000


def test_units_hold_every_sample_once_in_a_reproducible_mixture() -> None:
    samples, _, _ = tokenise(conversations(80), max_length=60)
    units = plan_units(samples, unit_bytes=5000, hidden_size=8, state_dtype="bfloat16", seed=4)
    shuffled = random.Random(1).sample(samples, len(samples))
    assert plan_units(shuffled, unit_bytes=5000, hidden_size=8, state_dtype="bfloat16", seed=4) == units
    assert plan_units(samples, unit_bytes=5000, hidden_size=8, state_dtype="bfloat16", seed=5) != units
    assert sorted(s.sample_id for u in units for s in u.samples) == sorted(s.sample_id for s in samples)
    assert [u.index for u in units] == list(range(len(units)))
    for unit in units:
        lengths = [len(s.input_ids) for s in unit.samples]
        assert lengths == sorted(lengths)
        assert {s.split for s in unit.samples} == {unit.split}


def test_packs_hold_every_sample_once_within_the_budget() -> None:
    rng = random.Random(0)
    for _ in range(200):
        lengths = [rng.randint(1, 50) for _ in range(rng.randint(0, 30))]
        packs = plan_packs(lengths, 60)
        assert [i for pack in packs for i in pack] == list(range(len(lengths)))
        assert all(len(pack) == 1 or sum(lengths[i] for i in pack) <= 60 for pack in packs)
    assert plan_packs([10, 500, 10], 60) == [[0], [1], [2]]
