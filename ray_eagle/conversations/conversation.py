"""One conversation: messages beside the exact token ids, and which of those the assistant wrote."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from ray_eagle.conversations.prompts import Split
from ray_eagle.errors import InputError
from ray_eagle.run import Folder


@dataclass(frozen=True)
class Conversation:
    source_id: str
    category: str
    split: Split
    messages: list[dict[str, Any]]
    input_ids: list[int]
    supervised: list[list[int]]
    """[start, end) spans of `input_ids` that the assistant wrote, end-of-turn token included."""
    finish_reasons: list[str]
    """Of each answer: `stop`, `length`, or of a kept one without an end-of-turn mark `none`."""
    note: str = ""
    """Why a conversation ended before its last prompt turn; empty for a whole one."""
    mask: Literal["generated", "template", "rendering", "imported"] = "generated"
    """Where the mask is from: exact output ids, the template's generation blocks, checked rendering, or imported states."""
    row: int = 0
    """Number of the input row, from 1."""

    @property
    def loss_mask(self) -> list[int]:
        """1 where the assistant wrote the token."""
        mask = [0] * len(self.input_ids)
        for start, end in self.supervised:
            mask[start:end] = [1] * (end - start)
        return mask

    @property
    def supervised_tokens(self) -> int:
        return sum(end - start for start, end in self.supervised)

    def to_row(self) -> dict[str, Any]:
        """Its fields by name, not copied (`asdict` would copy each id)."""
        return dict(vars(self))


def part_name(batch: int) -> str:
    return f"part-{batch:05d}.jsonl"


def read_conversations(folder: Folder) -> Iterator[Conversation]:
    """All committed conversations, part by part. Raises InputError for a damaged part."""
    for name in folder.names():
        if name.startswith("part-"):
            for number, row in enumerate(folder.read_jsonl(name), 1):
                try:
                    yield Conversation(**row)
                except TypeError as error:
                    raise InputError(f"{folder.file(name)}, line {number}: not a conversation ({error}).") from None
