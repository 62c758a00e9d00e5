"""Stage `generate` with `states.path`: tokens and masks come from files of hidden states that another project captured.

A conversation here has no messages. It ends with its last supervised token: what follows teaches nothing, padding included.
"""

import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ray_eagle.config import Config, GenerateConfig, StatesConfig
from ray_eagle.conversations.batches import commit, gather_rejected
from ray_eagle.conversations.conversation import Conversation, part_name
from ray_eagle.conversations.prompts import hashed_split
from ray_eagle.errors import ConfigError, InputError, explain
from ray_eagle.hidden_states.loose import Masks, find_files, read_sample, spans
from ray_eagle.progress import Progress
from ray_eagle.run import Folder
from ray_eagle.target.loading import TargetFacts

PART = 500
"""Files whose conversations are committed together."""
READERS = 8
LOOKED_AT = 50
"""Files at most by which an import is estimated."""
Convert = Callable[[int, str], Conversation | dict[str, Any]]


def import_conversations(config: Config, folder: Folder, facts: TargetFacts, progress: Progress) -> None:
    """Write part-NNNNN.jsonl and rejected.jsonl. Files whose part is there already are not opened again.

    Raises ConfigError when the captured layers are not the run's, InputError when no file can be used.
    """
    names, convert = _files(config, facts)
    done = set(folder.names())
    progress.start("generate", len(names), "files")
    with ThreadPoolExecutor(READERS) as readers:
        for index, first in enumerate(range(0, len(names), PART)):
            some = names[first : first + PART]
            if part_name(index) not in done:
                made = list(readers.map(convert, range(first + 1, first + 1 + len(some)), some))
                kept = [row for row in made if isinstance(row, Conversation)]
                commit(folder, index, [c.to_row() for c in kept], [row for row in made if isinstance(row, dict)])
            progress.advance(len(some))
    gather_rejected(folder, [])
    if not any(folder.read_bytes(part_name(i)) for i in range(-(-len(names) // PART))):
        raise _none_usable(config, folder.read_jsonl("rejected.jsonl"))


@dataclass(frozen=True)
class Outlook:
    """What an import will yield."""

    files: int
    samples: int
    """Of them, those that can be used."""
    tokens_per_sample: float
    supervised_share: float


def look_at_files(config: Config, facts: TargetFacts) -> Outlook:
    """By a few files, drawn at random but the same each time. Raises what `import_conversations` raises, where these tell it."""
    names, convert = _files(config, facts)
    some = random.Random(0).sample(names, min(LOOKED_AT, len(names)))
    made = list(map(convert, range(1, 1 + len(some)), some))
    kept = [row for row in made if isinstance(row, Conversation)]
    if not kept:
        raise _none_usable(config, [row for row in made if isinstance(row, dict)])
    tokens = sum(len(c.input_ids) for c in kept)
    return Outlook(
        files=len(names),
        samples=round(len(names) * len(kept) / len(made)),
        tokens_per_sample=tokens / len(kept),
        supervised_share=sum(c.supervised_tokens for c in kept) / tokens,
    )


def _files(config: Config, facts: TargetFacts) -> tuple[list[str], Convert]:
    """The files to import, and what makes a conversation of one."""
    settings = config.states
    if settings.outputs != facts.aux_layers:
        raise ConfigError(
            explain(
                "states.layers",
                where=f"{list(settings.layers or ())}, read as the {settings.convention} of each layer",
                expected=f"the layers of this run, outputs of {list(facts.aux_layers)}",
                found=f"outputs of {list(settings.outputs)}",
                fix=f"Set target.aux_layers to {list(settings.outputs)}, or states.convention if the ids mean something else.",
            )
        )
    root = Path(settings.path)
    masks = Masks(Path(settings.masks)) if settings.masks else None
    convert = partial(conversation_of, root, settings=settings, generate=config.generate, facts=facts, masks=masks)
    return find_files(root)[: config.generate.limit], convert


def _none_usable(config: Config, rejected: Sequence[dict[str, Any]]) -> InputError:
    reasons = "; ".join(f"{r['source_id']}: {r['reason']}" for r in rejected[:3])
    return InputError(
        f"states.path {config.states.path}: expected at least one file that can be used, found none ({reasons})."
    )


def conversation_of(
    root: Path,
    number: int,
    name: str,
    *,
    settings: StatesConfig,
    generate: GenerateConfig,
    facts: TargetFacts,
    masks: Masks | None,
) -> Conversation | dict[str, Any]:
    """A file's conversation, or the reason why it has none."""
    try:
        sample = read_sample(root, name, facts.hidden_size)
        ids = sample.ids_T.tolist()
        if sample.mask_T is not None:
            mask = sample.mask_T.int().tolist()
        elif masks is not None:
            mask = masks.of(name, ids)
        elif settings.supervise_all:
            mask = [0] + [1] * (len(ids) - 1)
        else:
            raise InputError("no loss_mask: set states.masks to the dataset that has it, or states.supervise_all")
        if outside := next((i for i in ids if not 0 <= i < facts.vocab_size), None):
            raise InputError(f"token {outside} is not one of the target's {facts.vocab_size}")
        supervised = list(spans(mask))
        if not supervised:
            raise InputError("no supervised token")
    except InputError as error:
        return {"row": number, "source_id": name, "reason": str(error)}
    return Conversation(
        source_id=name,
        category=sample.project,
        split=hashed_split(name, generate.held_out_share, generate.validation_share),
        messages=[],
        input_ids=ids[: supervised[-1][1]],
        supervised=supervised,
        finish_reasons=["none"] * len(supervised),
        mask="imported",
        row=number,
    )
