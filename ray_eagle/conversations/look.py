"""Looking at conversations: pieces of text with their mask, and figures over all of them. Pure; the command line prints."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import xxhash
from pydantic import BaseModel

from ray_eagle.conversations.conversation import Conversation
from ray_eagle.conversations.generate import has_reasoning

CONTROL = {i: f"\\x{i:02x}" for i in (*range(0x20), *range(0x7F, 0xA0)) if chr(i) not in "\n\t"}
"""Characters that a terminal obeys, as they are shown."""
QUANTILES = {"min": 0.0, "median": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}


@dataclass(frozen=True)
class Piece:
    """Neighbouring tokens of one kind, as text."""

    text: str
    supervised: bool
    special: bool


def pieces(conversation: Conversation, tokenizer: Any, *, ids: bool = False) -> Iterator[Piece]:
    """The conversation as the target reads it. Special tokens are pieces of their own; with `ids`, every token is.

    Control characters other than line ends and tabs are spelled out: those of the data must not reach a terminal.
    Bytes of one character may lie in several tokens: these are decoded together, unless ids are asked for.
    """
    special = {int(i) for i in tokenizer.get_added_vocab().values()}
    run: list[int] = []
    state = (False, False)
    for token, supervised in zip(conversation.input_ids, conversation.loss_mask, strict=True):
        now = (bool(supervised), token in special)
        if run and (now != state or now[1] or ids):
            yield _piece(run, state, tokenizer, ids)
            run = []
        run, state = [*run, token], now
    if run:
        yield _piece(run, state, tokenizer, ids)


def _piece(run: list[int], state: tuple[bool, bool], tokenizer: Any, ids: bool) -> Piece:
    text = tokenizer.decode(run, skip_special_tokens=False, clean_up_tokenization_spaces=False).translate(CONTROL)
    return Piece(f"{text}[{run[0]}]" if ids else text, *state)


class ConversationStats(BaseModel):
    """Figures over the conversations of a folder."""

    conversations: int
    tokens: int
    supervised_tokens: int
    supervised_share: float
    lengths: dict[str, int]
    """Tokens of a conversation: min, median, p90, p99, max."""
    supervised_lengths: dict[str, int]
    answers: int
    answers_with_reasoning: int
    splits: dict[str, int]
    categories: dict[str, int]
    finish_reasons: dict[str, int]
    masks: dict[str, int]
    duplicates: int
    """Conversations whose tokens and mask another one before has too."""


def stats(conversations: Iterable[Conversation], marks: tuple[str, str]) -> ConversationStats:
    """One pass; about 100 bytes a conversation are kept."""
    lengths: list[int] = []
    supervised: list[int] = []
    counts: dict[str, Counter[str]] = {name: Counter() for name in ("split", "category", "finish", "mask")}
    seen: set[bytes] = set()
    answers = reasoned = duplicates = 0
    for c in conversations:
        lengths.append(len(c.input_ids))
        supervised.append(c.supervised_tokens)
        counts["split"][c.split] += 1
        counts["category"][c.category] += 1
        counts["finish"].update(c.finish_reasons)
        counts["mask"][c.mask] += 1
        content = xxhash.xxh3_128_digest(repr((c.input_ids, c.supervised)).encode())
        duplicates += content in seen
        seen.add(content)
        said = [message for message in c.messages if message["role"] == "assistant"]
        answers += len(said)
        reasoned += sum(has_reasoning(message, marks) for message in said)
    return ConversationStats(
        conversations=len(lengths),
        tokens=sum(lengths),
        supervised_tokens=sum(supervised),
        supervised_share=sum(supervised) / max(1, sum(lengths)),
        lengths=_quantiles(lengths),
        supervised_lengths=_quantiles(supervised),
        answers=answers,
        answers_with_reasoning=reasoned,
        splits=dict(counts["split"].most_common()),
        categories=dict(counts["category"].most_common()),
        finish_reasons=dict(counts["finish"].most_common()),
        masks=dict(counts["mask"].most_common()),
        duplicates=duplicates,
    )


def _quantiles(values: list[int]) -> dict[str, int]:
    """Of the sorted values, the one at the rounded place."""
    ordered = sorted(values)
    return {name: ordered[round(q * (len(ordered) - 1))] for name, q in QUANTILES.items()} if ordered else {}
