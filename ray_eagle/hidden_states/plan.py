"""The plan of a dataset: which samples make which unit, in which order. Pure, and the same on every resume."""

import random
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from ray_eagle.conversations.conversation import Conversation
from ray_eagle.conversations.prompts import Split
from ray_eagle.hidden_states.schema import sample_bytes, sample_id

FORMAT = "ray_eagle.hidden_states/2"
LAYER_CONVENTION = "output of layer L, 0-based"


@dataclass(frozen=True)
class TokenSample:
    """A sample before capture."""

    sample_id: str
    source_id: str
    split: Split
    input_ids: Sequence[int]
    loss_mask: Sequence[int]

    @property
    def teaching(self) -> int:
        """S: how many positions predict a supervised token."""
        return sum(self.loss_mask[1:])


class UnitPlan(BaseModel):
    split: Split
    samples: list[str]
    """sample_id of each row, in order."""
    tokens: int
    lender: str | None = None
    """The record, in another dataset, of a unit that holds these rows already: they are read there, not captured again."""


@dataclass(frozen=True)
class Unit:
    """Samples that are captured, written and committed together."""

    index: int
    split: Split
    samples: tuple[TokenSample, ...]
    lender: str | None = None

    @property
    def tokens(self) -> int:
        return sum(len(sample.input_ids) for sample in self.samples)

    @property
    def planned(self) -> UnitPlan:
        """What dataset.json says of it."""
        names = [sample.sample_id for sample in self.samples]
        return UnitPlan(split=self.split, samples=names, tokens=self.tokens, lender=self.lender)

    def __str__(self) -> str:
        return f"{self.index} ({len(self.samples)} samples)"


class Quarantined(BaseModel):
    """A sample that was set aside."""

    sample_id: str
    source_id: str
    reason: str


class DatasetPlan(BaseModel):
    """dataset.json: everything that decides the bytes of the shards."""

    format: str = FORMAT
    layer_convention: str = LAYER_CONVENTION
    aux_layers: tuple[int, int, int]
    hidden_size: int
    vocab_size: int
    state_dtype: str
    last_norm: str = "after"
    """`last` is the last state after the target's final norm: teacher logits are last @ lm_head.T, scaled and
    soft-capped as the target's config.json says (`target/logits.py`)."""
    compute_dtype: str
    """Of the target's weights and forward pass."""
    attention: str
    """`target.attention` of the run."""
    tokens_per_batch: int
    """Token budget of a forward pass: batch composition decides the last bits of the states."""
    seed: int
    target: dict[str, str]
    conversations: str
    """Key of the conversations."""
    units: list[UnitPlan]
    rejected: list[dict[str, str]]
    """Conversations without a row, each with its reason."""
    quarantined: list[Quarantined] = []
    """Samples that the target cannot read: longer than its context, or with a token that it does not have."""


def tokenise(
    conversations: Iterable[Conversation], max_length: int
) -> tuple[list[TokenSample], list[dict[str, str]], int]:
    """Samples, rejected conversations with their reason, and how many were cut to `max_length` tokens.

    The driver holds them all: 5 bytes a token.
    """
    samples: dict[str, TokenSample] = {}
    rejected, cut = [], 0
    for conversation in conversations:
        ids, mask = conversation.input_ids[:max_length], conversation.loss_mask[:max_length]
        name = sample_id(ids, mask)
        if not any(mask[1:]):
            rejected.append(
                {"source_id": conversation.source_id, "reason": f"no supervised token in {len(ids)} tokens"}
            )
        elif name in samples:
            rejected.append(
                {"source_id": conversation.source_id, "reason": f"same tokens as {samples[name].source_id}"}
            )
        else:
            cut += len(ids) < len(conversation.input_ids)
            tokens = array("i", ids), array("B", mask)
            samples[name] = TokenSample(name, conversation.source_id, conversation.split, *tokens)
    return list(samples.values()), rejected, cut


def set_aside_unreadable(
    samples: list[TokenSample], context: int, vocabulary: int
) -> tuple[list[TokenSample], list[Quarantined]]:
    """Samples that the target can read, and those beyond its context or its vocabulary (a tokenizer may know more tokens)."""
    kept: list[TokenSample] = []
    aside: list[Quarantined] = []
    for s in samples:
        reason = ""
        if len(s.input_ids) > context:
            reason = f"{len(s.input_ids)} tokens, the target's context is {context}: lower extract.max_length to cut it"
        elif max(s.input_ids) >= vocabulary:
            reason = f"token {max(s.input_ids)}, the target has {vocabulary} (vocab_size in its config.json)"
        if reason:
            aside.append(Quarantined(sample_id=s.sample_id, source_id=s.source_id, reason=reason))
        else:
            kept.append(s)
    return kept, aside


def plan_units(
    samples: list[TokenSample],
    *,
    unit_bytes: float,
    hidden_size: int,
    state_dtype: str,
    seed: int,
    lent: dict[str, str] | None = None,
) -> list[Unit]:
    """Units of one split and one lender each: a seeded random mixture of about `unit_bytes`, sorted by length inside.

    `lent` maps a sample_id to the record, in another dataset, of the unit that holds it already.
    """
    lent = lent or {}
    units: list[Unit] = []
    buckets: dict[tuple[str, str], list[TokenSample]] = {}
    for sample in samples:
        buckets.setdefault((sample.split, lent.get(sample.sample_id, "")), []).append(sample)
    for split in ("train", "validation", "held_out"):
        for lender in sorted(lender for holder, lender in buckets if holder == split):
            rows = buckets[split, lender]
            rows.sort(key=lambda s: s.sample_id)
            random.Random(f"{seed} {split}").shuffle(rows)
            group: list[TokenSample] = []
            size = 0
            for row in rows:
                size += sample_bytes(len(row.input_ids), row.teaching, hidden_size, state_dtype)
                group.append(row)
                if size >= unit_bytes:
                    units.append(_unit(len(units), split, group, lender or None))
                    group, size = [], 0
            if group:
                units.append(_unit(len(units), split, group, lender or None))
    return units


def plan_packs(lengths: list[int], budget: int) -> list[list[int]]:
    """Indices of consecutive samples for each forward pass, at most `budget` tokens, or one longer sample alone."""
    packs: list[list[int]] = []
    used = 0
    for index, length in enumerate(lengths):
        if packs and used + length <= budget:
            packs[-1].append(index)
            used += length
        else:
            packs.append([index])
            used = length
    return packs


def _unit(index: int, split: Any, group: list[TokenSample], lender: str | None) -> Unit:
    return Unit(index, split, tuple(sorted(group, key=lambda s: (len(s.input_ids), s.sample_id))), lender)
