"""The plan of a dataset: which samples make which unit, in which order. Pure, and the same on every resume."""

import random
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from ray_eagle.conversations.conversation import Conversation
from ray_eagle.conversations.prompts import Split
from ray_eagle.hidden_states.schema import sample_id

FORMAT = "ray_eagle.hidden_states/1"
LAYER_CONVENTION = "output of layer L, 0-based"


@dataclass(frozen=True)
class TokenSample:
    """A sample before capture."""

    sample_id: str
    source_id: str
    split: Split
    input_ids: tuple[int, ...]
    loss_mask: tuple[int, ...]

    @property
    def teaching(self) -> int:
        """S: how many positions predict a supervised token."""
        return sum(self.loss_mask[1:])


@dataclass(frozen=True)
class Unit:
    """Samples that are captured, written and committed together."""

    index: int
    split: Split
    samples: tuple[TokenSample, ...]

    def __str__(self) -> str:
        return f"{self.index} ({len(self.samples)} samples)"


class UnitPlan(BaseModel):
    split: Split
    samples: list[str]
    """sample_id of each row, in order."""
    tokens: int


class DatasetPlan(BaseModel):
    """dataset.json: everything that decides the bytes of the shards."""

    format: str = FORMAT
    layer_convention: str = LAYER_CONVENTION
    aux_layers: tuple[int, int, int]
    hidden_size: int
    vocab_size: int
    state_dtype: str
    last_norm: str = "after"
    """`last` is the last state after the target's final norm: teacher logits are last @ lm_head.T."""
    tokens_per_batch: int
    """Token budget of a forward pass: batch composition decides the last bits of the states."""
    seed: int
    target: dict[str, str]
    conversations: str
    """Key of the conversations."""
    units: list[UnitPlan]
    rejected: list[dict[str, str]]
    """Conversations without a row, each with its reason."""


def tokenise(conversations: list[Conversation], max_length: int) -> tuple[list[TokenSample], list[dict[str, str]], int]:
    """Samples, rejected conversations with their reason, and how many were cut to `max_length` tokens."""
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
            samples[name] = TokenSample(name, conversation.source_id, conversation.split, tuple(ids), tuple(mask))
    return list(samples.values()), rejected, cut


def plan_units(
    samples: list[TokenSample], *, unit_bytes: float, hidden_size: int, state_bytes: int, seed: int
) -> list[Unit]:
    """Units of one split each: a seeded random mixture of about `unit_bytes`, sorted by length inside."""
    units: list[Unit] = []
    for split in ("train", "validation", "held_out"):
        rows = sorted((s for s in samples if s.split == split), key=lambda s: s.sample_id)
        random.Random(f"{seed} {split}").shuffle(rows)
        group: list[TokenSample] = []
        size = 0
        for row in rows:
            size += sample_bytes(len(row.input_ids), row.teaching, hidden_size, state_bytes)
            group.append(row)
            if size >= unit_bytes:
                units.append(_unit(len(units), split, group))
                group, size = [], 0
        if group:
            units.append(_unit(len(units), split, group))
    return units


def sample_bytes(tokens: int, teaching: int, hidden_size: int, state_bytes: int) -> int:
    """Payload of one row: aux everywhere, last with top-1 and log-sum-exp where a teacher is, ids and mask."""
    return tokens * (3 * hidden_size * state_bytes + 5) + teaching * (hidden_size * state_bytes + 8)


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


def _unit(index: int, split: Any, group: list[TokenSample]) -> Unit:
    return Unit(index, split, tuple(sorted(group, key=lambda s: (len(s.input_ids), s.sample_id))))
