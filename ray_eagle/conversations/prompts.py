"""Prompts: read them, split them by a stable hash, and keep near-duplicates of training prompts out of the probe."""

import hashlib
import json
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from ray_eagle.config import PRESETS, GenerateConfig
from ray_eagle.errors import InputError

Split = Literal["train", "validation", "held_out"]
BUILTIN = PRESETS / "prompts.jsonl"


@dataclass(frozen=True)
class Prompt:
    """One conversation's user messages, and what it is for."""

    id: str
    category: str
    turns: tuple[str, ...]
    split: Split = "train"


def load_prompts(config: GenerateConfig) -> list[Prompt]:
    """The prompts of `config.prompts`, split; raises InputError that names a broken line."""
    path = BUILTIN if config.prompts == "builtin" else Path(config.prompts).expanduser()
    prompts = read_prompts(path)[: config.limit]
    return split_prompts(
        prompts,
        held_out_share=config.held_out_share,
        validation_share=config.validation_share,
        near_duplicate=config.near_duplicate,
    )


def prompts_hash(config: GenerateConfig) -> str:
    """Hash of the prompt file's content."""
    path = BUILTIN if config.prompts == "builtin" else Path(config.prompts).expanduser()
    try:
        return hashlib.blake2b(path.read_bytes(), digest_size=8).hexdigest()
    except OSError as error:
        raise InputError(f"prompts file {path} cannot be read ({error.strerror}). Check generate.prompts.") from None


def read_prompts(path: Path) -> list[Prompt]:
    """One `{"id", "category", "turns": [user message, ...]}` a line. Raises InputError that names file and line."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InputError(f"prompts file {path} cannot be read ({error.strerror}). Check generate.prompts.") from None
    prompts: dict[str, Prompt] = {}
    lines: dict[str, int] = {}
    # not splitlines: JSON may hold U+2028 and its like as they are
    for number, line in enumerate(content.split(b"\n"), 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        prompt = _parse(line, where)
        if prompt.id in prompts:
            first = lines[prompt.id]
            raise InputError(f"{where}: expected distinct ids, found {prompt.id!r} as in line {first}. Rename one.")
        prompts[prompt.id], lines[prompt.id] = prompt, number
    if not prompts:
        raise InputError(f"prompts file {path}: expected at least one prompt, found none.")
    return list(prompts.values())


def _parse(line: bytes, where: str) -> Prompt:
    expected = 'expected {"id": text, "category": text, "turns": [text, ...]}'
    try:
        row: Any = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise InputError(f"{where}: expected UTF-8, found other bytes ({error}). Convert the file.") from None
    except ValueError as error:
        raise InputError(f"{where}: {expected}, found broken JSON ({error}). Correct or delete the line.") from None
    turns = row.get("turns") if isinstance(row, dict) else None
    if not (isinstance(turns, list) and turns and all(isinstance(t, str) and t.strip() for t in turns)):
        raise InputError(f"{where}: {expected}, found turns {turns!r}. Correct or delete the line.")
    if not isinstance(row.get("id"), str):
        raise InputError(f"{where}: {expected}, found id {row.get('id')!r}. Give every prompt an id.")
    return Prompt(row["id"], str(row.get("category", "none")), tuple(turns))


def split_prompts(
    prompts: list[Prompt], *, held_out_share: float, validation_share: float, near_duplicate: float
) -> list[Prompt]:
    """Assign splits by the hash of the id, so that adding prompts moves none of the others.

    A held-out prompt whose text is close to that of any prompt outside the held-out set is trained on instead.
    """
    split: list[Prompt] = []
    for prompt in prompts:
        place = int.from_bytes(hashlib.blake2b(prompt.id.encode(), digest_size=8).digest(), "little") / 2**64
        kind: Split = "held_out" if place < held_out_share else "train"
        if held_out_share <= place < held_out_share + validation_share:
            kind = "validation"
        split.append(replace(prompt, split=kind))
    texts = [shingles(" ".join(p.turns)) for p in split]
    trained = [text for p, text in zip(split, texts, strict=True) if p.split != "held_out"]
    while trained:  # what is moved may be close to another held-out prompt in its turn
        index = ShingleIndex(trained)
        moved = [i for i, p in enumerate(split) if p.split == "held_out" and index.closest(texts[i]) >= near_duplicate]
        for i in moved:
            split[i] = replace(split[i], split="train")
        trained = [texts[i] for i in moved]
    return split


def shingles(text: str, size: int = 5) -> frozenset[str]:
    """The set of character n-grams of the case-folded text with single spaces."""
    folded = " ".join(text.casefold().split())
    return frozenset(folded[i : i + size] for i in range(max(1, len(folded) - size + 1)))


class ShingleIndex:
    """Many sets of shingles, by shingle: the closest one is found without looking at those that share none."""

    def __init__(self, sets: list[frozenset[str]]) -> None:
        self._sizes = [len(one) for one in sets]
        self._holders: dict[str, list[int]] = {}
        for number, one in enumerate(sets):
            for shingle in one:
                self._holders.setdefault(shingle, []).append(number)

    def closest(self, one: frozenset[str]) -> float:
        """Highest Jaccard similarity of a set with any of these; 0 without any."""
        shared: Counter[int] = Counter()
        for shingle in one:
            shared.update(self._holders.get(shingle, ()))
        return max((both / (len(one) + self._sizes[i] - both) for i, both in shared.items()), default=0.0)
