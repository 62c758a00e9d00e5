"""Prompts: read them, split them by a stable hash, and keep near-duplicates of training prompts out of the probe."""

import hashlib
from dataclasses import dataclass, replace
from typing import Any, Literal, NoReturn

from ray_eagle.config import GenerateConfig
from ray_eagle.conversations.inputs import BUILTIN, read_chunks, shape_of, source_hash
from ray_eagle.conversations.messages import Row, RowError, Shape, own_id, read_row
from ray_eagle.conversations.similarity import HashIndex, close_to_trained, hashed_shingles, near_any
from ray_eagle.errors import InputError

__all__ = ["BUILTIN", "Prompt", "Split", "load_prompts", "read_prompts"]

Split = Literal["train", "validation", "held_out"]


@dataclass(frozen=True)
class Prompt:
    """One conversation's user messages, and what it is for."""

    id: str
    category: str
    turns: tuple[str, ...]
    split: Split = "train"
    system: str = ""
    """The system message before the first; empty for none."""
    row: int = 0
    """Number of its row in the file, from 1; 0 when not known."""

    @property
    def text(self) -> str:
        """What is compared with other prompts."""
        return " ".join(self.turns)


def load_prompts(config: GenerateConfig) -> list[Prompt]:
    """The prompts of `config.prompts` that can be used, split. Raises InputError when there is none."""
    return load_rows(config)[0]


def load_rows(config: GenerateConfig) -> tuple[list[Prompt], list[dict[str, Any]]]:
    """Prompts, split, and the other rows of the file, each with its `row` number, `source_id` and `reason`.

    Raises InputError when the file cannot be read or no row can be used.
    """
    shape = shape_of(config.prompts, config.shape)
    prompts: list[Prompt] = []
    rejected: list[dict[str, Any]] = []
    first: dict[str, int] = {}
    for chunk in read_chunks(config.prompts, config.limit):
        for number, raw in chunk.rows():
            name = own_id(raw)
            try:
                row = usable_row(raw, shape, config)
                name = row.id
                if name in first:
                    raise RowError(f"same id as row {first[name]}")
                prompts.append(_prompt_of(row, number, regenerate=config.answers == "regenerate"))
                first[name] = number
            except RowError as error:
                rejected.append({"row": number, "source_id": name, "reason": str(error)})
    if not prompts:
        refuse_all(config.prompts, rejected)
    split = split_prompts(
        prompts,
        held_out_share=config.held_out_share,
        validation_share=config.validation_share,
        near_duplicate=config.near_duplicate,
    )
    return split, rejected


def usable_row(raw: Any, shape: Shape, config: GenerateConfig) -> Row:
    """Raises RowError, also for a row that could not be decoded, or that has no answer though answers are kept."""
    if isinstance(raw, RowError):
        raise raw
    row = read_row(raw, shape, config.reasoning_marks)
    if config.answers == "keep" and not any(m["role"] == "assistant" for m in row.messages):
        raise RowError("no answer of the assistant to keep")
    return row


def refuse_all(source: str, rejected: list[dict[str, Any]]) -> NoReturn:
    """Raises InputError with the first reasons."""
    reasons = "; ".join(f"row {r['row']}: {r['reason']}" for r in rejected[:3]) or "it is empty"
    raise InputError(
        f"prompts file {source}: expected at least one row that can be used, found none ({reasons}). Correct it, or set "
        "generate.shape."
    )


def _prompt_of(row: Row, number: int, *, regenerate: bool) -> Prompt:
    """What the user says, for the target to answer. Raises RowError for a row whose answers hang on tools."""
    users = tuple(m["content"] for m in row.messages if m["role"] == "user")
    system = "\n\n".join(m["content"] for m in row.messages if m["role"] in ("system", "developer"))
    if regenerate and (row.tools or any(m["role"] == "tool" or m.get("tool_calls") for m in row.messages)):
        raise RowError("it uses tools, whose results cannot be made again. Set generate.answers to keep")
    if regenerate and not all(text.strip() for text in users):
        raise RowError("a message of the user is empty")
    return Prompt(row.id, row.category, users, system=system, row=number)


def prompts_hash(config: GenerateConfig) -> str:
    """Hash of the prompt file's content."""
    return source_hash(config.prompts)


def read_prompts(source: str) -> list[Prompt]:
    """Every row of a file as a prompt, in any shape. Raises InputError that names the first row that cannot be used."""
    prompts, unusable = load_rows(GenerateConfig(prompts=source, held_out_share=0, validation_share=0))
    if unusable:
        first = unusable[0]
        raise InputError(f"prompts file {source}, row {first['row']}: {first['reason']}. Correct or delete it.")
    return prompts


def split_prompts(
    prompts: list[Prompt], *, held_out_share: float, validation_share: float, near_duplicate: float
) -> list[Prompt]:
    """Assign splits by the hash of the id, so that adding prompts moves none of the others.

    A held-out prompt whose text is close to that of any prompt outside the held-out set is trained on instead.
    """
    split = [replace(p, split=hashed_split(p.id, held_out_share, validation_share)) for p in prompts]
    held_out = [i for i, p in enumerate(split) if p.split == "held_out"]
    texts = [hashed_shingles(split[i].text) for i in held_out]
    near = near_any(HashIndex.of(texts), (p.text for p in split if p.split != "held_out"), near_duplicate)
    for i in close_to_trained(texts, near, near_duplicate):
        split[held_out[i]] = replace(split[held_out[i]], split="train")
    return split


def hashed_split(name: str, held_out_share: float, validation_share: float) -> Split:
    """By the hash of the id alone."""
    place = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") / 2**64
    if place < held_out_share:
        return "held_out"
    return "validation" if place < held_out_share + validation_share else "train"
