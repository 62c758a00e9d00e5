"""Stage `generate`: the target answers the prompts, batch by batch, on Ray actors.

A batch is the unit of resume: its conversations are one atomic file, written by the driver. What a batch holds depends on
the prompts and settings alone, so a killed run goes on where it was and ends with the same conversations.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig

from ray_eagle.cluster import ensure_resources
from ray_eagle.config import Config, GenerateConfig, TargetConfig
from ray_eagle.conversations.conversation import Conversation, part_name, read_conversations
from ray_eagle.conversations.prompts import Prompt, load_prompts
from ray_eagle.conversations.template import render_next_turn, render_prompt
from ray_eagle.errors import InputError
from ray_eagle.pool import ActorPool, Member, this_node
from ray_eagle.progress import Progress, Rate
from ray_eagle.run import RunFolder
from ray_eagle.stage import Outcome
from ray_eagle.target.generation import eos_ids, generate_batch
from ray_eagle.target.loading import TargetFacts, load_model, load_tokenizer


@dataclass(frozen=True)
class Batch:
    """Prompts that are decoded together."""

    index: int
    prompts: tuple[Prompt, ...]

    def __str__(self) -> str:
        return f"{self.index} ({self.prompts[0].id} ... {self.prompts[-1].id})"


class Generator:
    """Holds the target and answers batches; the body of one actor."""

    def __init__(self, target: TargetConfig, facts: TargetFacts, settings: GenerateConfig, seed: int) -> None:
        torch.set_num_threads(max(1, round(settings.cpus)))
        self.settings = settings
        self.seed = seed
        self.tokenizer = load_tokenizer(facts, target)
        self.model = load_model(facts, target, torch.device("cuda" if settings.gpus else "cpu"))
        self.eos = eos_ids(self.model, self.tokenizer)
        # a repetition penalty of the model's own would make another text than the teacher's and the server's
        self.model.generation_config = GenerationConfig()
        self.context = facts.max_position_embeddings

    def ready(self) -> str:
        return this_node()

    def work(self, batch: Batch, without: frozenset[str] = frozenset()) -> list[dict[str, Any]]:
        """One row a conversation, in the order of the batch; multi-turn prompts are answered turn by turn.

        A batch cannot be taken apart, so nothing is ever left out (`without` is the pool's).
        """
        chats = [_Chat(prompt, render_prompt(self.tokenizer, prompt.turns[0])) for prompt in batch.prompts]
        for turn in range(max(len(prompt.turns) for prompt in batch.prompts)):
            active = [chat for chat in chats if turn < len(chat.prompt.turns)]
            if turn:
                active = [chat for chat in active if self._continue(chat, turn)]
                if not active:
                    continue
            answers = generate_batch(
                self.model,
                [chat.ids for chat in active],
                eos=self.eos,
                pad=self.tokenizer.pad_token_id if self.tokenizer.pad_token_id is not None else self.eos[0],
                max_new_tokens=self.settings.max_new_tokens,
                temperature=self.settings.temperature,
                top_p=self.settings.top_p,
                seed=self.seed * 1_000_003 + batch.index * 101 + turn,
            )
            for chat, answer in zip(active, answers, strict=True):
                start = len(chat.ids)
                chat.ids += answer.ids
                chat.supervised.append([start, len(chat.ids)])
                chat.finish_reasons.append(answer.finish_reason)
                written = answer.ids[:-1] if answer.finish_reason == "stop" else answer.ids
                chat.messages += [
                    {"role": "user", "content": chat.prompt.turns[turn]},
                    {"role": "assistant", "content": self.tokenizer.decode(written)},
                ]
        return [chat.conversation().to_row() for chat in chats]

    def _continue(self, chat: "_Chat", turn: int) -> bool:
        """Append the next user message; or end the conversation before it, with the reason, keeping what there is."""
        if chat.note:
            return False
        try:
            ended = self.tokenizer.decode(chat.ids[-1:]) if chat.finish_reasons[-1] == "stop" else ""
            ids = render_next_turn(self.tokenizer, chat.messages, chat.prompt.turns[turn], end_of_turn=ended)
        except InputError as error:
            chat.note = f"ended before turn {turn + 1}: {error}"
            return False
        if len(chat.ids) + len(ids) + self.settings.max_new_tokens > self.context:
            chat.note = f"ended before turn {turn + 1}: it would pass the target's context of {self.context} tokens"
            return False
        chat.ids += ids
        return True


class _Chat:
    """A conversation while it is written."""

    def __init__(self, prompt: Prompt, ids: list[int]) -> None:
        self.prompt = prompt
        self.ids = list(ids)
        self.supervised: list[list[int]] = []
        self.messages: list[dict[str, str]] = []
        self.finish_reasons: list[str] = []
        self.note = ""

    def conversation(self) -> Conversation:
        p = self.prompt
        return Conversation(
            p.id, p.category, p.split, self.messages, self.ids, self.supervised, self.finish_reasons, self.note
        )


def generate(config: Config, run: RunFolder, facts: TargetFacts, progress: Progress) -> Outcome:
    """Answer every prompt that no committed part holds yet; write part-*.jsonl, rejected.jsonl and summary.json."""
    import ray

    settings = config.generate
    folder = run.of("generate")
    batches, rejected = plan_batches(
        load_prompts(settings), load_tokenizer(facts, config.target), settings, facts.max_position_embeddings
    )
    folder.write_jsonl("rejected.jsonl", rejected)
    for split, why in (("train", "nothing to learn from"), ("validation", "nothing to choose a checkpoint by")):
        if not any(prompt.split == split for batch in batches for prompt in batch.prompts):
            progress.say(
                f"generate: warning: no {split} prompt, so training has {why}. Add prompts or change the shares."
            )
    done = set(folder.names())
    waiting = [batch for batch in batches if part_name(batch.index) not in done]
    total = sum(len(batch.prompts) for batch in batches)
    progress.start("generate", total, "prompts", done=total - sum(len(batch.prompts) for batch in waiting))
    if waiting:
        ensure_resources({"CPU": settings.cpus, "GPU": settings.gpus}, settings.actors, config.ray.wait_s)
        actor = ray.remote(Generator)
        pool = ActorPool(
            lambda name: Member(
                actor.options(
                    name=name,
                    num_cpus=settings.cpus,
                    num_gpus=settings.gpus,
                    max_restarts=0,
                    max_task_retries=0,
                ).remote(config.target, facts, settings, config.seed)
            ),
            settings.actors,
            "eagle-generate",
        )
        rate = Rate(1)
        for batch, rows in pool.run(waiting):
            folder.write_jsonl(part_name(batch.index), rows)
            rate.advance(sum(end - start for row in rows for start, end in row["supervised"]))
            progress.advance(len(rows), f"{rate.per_second:,.0f} tok/s")
    summary = summarise(list(read_conversations(folder)), rejected)
    folder.write_json("summary.json", summary)
    if not summary["train"]["conversations"]:
        progress.say("generate: no training conversation was kept; see rejected.jsonl")
    return Outcome(samples=summary["conversations"], tokens=summary["tokens"])


def plan_batches(
    prompts: list[Prompt], tokenizer: Any, settings: GenerateConfig, context: int
) -> tuple[list[Batch], list[dict[str, Any]]]:
    """Batches of prompts of like length, and the rejected with their reason. Every prompt is in exactly one of them."""
    lengths = {prompt.id: len(render_prompt(tokenizer, prompt.turns[0])) for prompt in prompts}
    longest = min(settings.max_prompt_tokens, context - settings.max_new_tokens)
    kept = sorted((p for p in prompts if lengths[p.id] <= longest), key=lambda p: (lengths[p.id], p.id))
    reason = f"generate.max_prompt_tokens is {settings.max_prompt_tokens}, the target's context {context}"
    rejected = [
        {"source_id": p.id, "reason": f"prompt of {lengths[p.id]} tokens; {reason}"}
        for p in prompts
        if lengths[p.id] > longest
    ]
    size = settings.batch_size
    return [Batch(i // size, tuple(kept[i : i + size])) for i in range(0, len(kept), size)], rejected


def summarise(conversations: list[Conversation], rejected: list[Any]) -> dict[str, Any]:
    """Counts of conversations, tokens, finish reasons and rejections, in all and by split."""
    finish = Counter(reason for c in conversations for reason in c.finish_reasons)
    splits: dict[str, Any] = {}
    for split in ("train", "validation", "held_out"):
        rows = [c for c in conversations if c.split == split]
        splits[split] = {"conversations": len(rows), "supervised_tokens": sum(c.supervised_tokens for c in rows)}
    return {
        "conversations": len(conversations),
        "rejected": len(rejected),
        "cut_short": {c.source_id: c.note for c in conversations if c.note},
        "tokens": sum(len(c.input_ids) for c in conversations),
        "supervised_tokens": sum(c.supervised_tokens for c in conversations),
        "finish_reasons": dict(finish),
        **splits,
    }
