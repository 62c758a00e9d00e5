"""The unit that `generate` commits and resumes: a batch of prompts, whose conversations are one atomic file."""

from dataclasses import dataclass
from typing import Any

from ray_eagle.config import GenerateConfig
from ray_eagle.conversations.conversation import part_name
from ray_eagle.conversations.prompts import Prompt
from ray_eagle.conversations.template import render_prompt
from ray_eagle.run import Folder


@dataclass(frozen=True)
class Batch:
    """Prompts that are decoded, or committed, together."""

    index: int
    prompts: tuple[Prompt, ...]

    def __str__(self) -> str:
        return f"{self.index} ({self.prompts[0].id} ... {self.prompts[-1].id})"


def plan_batches(
    prompts: list[Prompt], tokenizer: Any, settings: GenerateConfig, context: int
) -> tuple[list[Batch], list[dict[str, Any]]]:
    """Batches of prompts of like length, and the rejected with their reason. Every prompt is in exactly one of them."""
    lengths = {prompt.id: len(render_prompt(tokenizer, prompt.turns[0], prompt.system)) for prompt in prompts}
    longest = min(settings.max_prompt_tokens, context - settings.max_new_tokens)
    kept = sorted((p for p in prompts if lengths[p.id] <= longest), key=lambda p: (lengths[p.id], p.id))
    reason = f"generate.max_prompt_tokens is {settings.max_prompt_tokens}, the target's context {context}"
    rejected = [
        {"row": p.row, "source_id": p.id, "reason": f"prompt of {lengths[p.id]} tokens; {reason}"}
        for p in prompts
        if lengths[p.id] > longest
    ]
    size = settings.part_size or settings.batch_size * (4 if settings.backend == "embedded" else 1)
    return [Batch(i // size, tuple(kept[i : i + size])) for i in range(0, len(kept), size)], rejected


def rejected_name(index: int) -> str:
    return f"rejected-{index:05d}.jsonl"


def commit(folder: Folder, index: int, rows: list[dict[str, Any]], rejected: list[dict[str, Any]]) -> None:
    """Write a batch. Its rejected rows stand first, in a file of their own: what has a part is complete."""
    name = rejected_name(index)
    if rejected:
        folder.write_jsonl(name, rejected)
    elif folder.exists(name):  # of a try that was killed before its part was written
        folder.delete_file(name)
    folder.write_jsonl(part_name(index), rows)


def gather_rejected(folder: Folder, before: list[dict[str, Any]]) -> None:
    """rejected.jsonl: the rows that were never asked, then those that the batches rejected. May be done again."""
    names = [name for name in folder.names() if name.startswith("rejected-")]
    folder.write_jsonl("rejected.jsonl", before + [row for name in names for row in folder.read_jsonl(name)])
