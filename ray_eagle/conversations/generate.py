"""Stage `generate`: the target answers the prompts, batch by batch, on Ray actors or servers; or the file's answers are kept.

A batch is the unit of resume: its conversations are one atomic file, written by the driver. What a batch holds depends on
the prompts and settings alone, so a killed run goes on where it was and ends with the same conversations.
"""

from collections import Counter, deque
from collections.abc import Iterable
from typing import Any

from transformers import GenerationConfig

from ray_eagle.cluster import connect, ensure_resources, marked
from ray_eagle.config import Config, GenerateConfig, TargetConfig
from ray_eagle.conversations.batches import Batch, commit, gather_rejected, plan_batches
from ray_eagle.conversations.chat import Made, TokenChat
from ray_eagle.conversations.conversation import Conversation, part_name, read_conversations
from ray_eagle.conversations.keep import keep_answers
from ray_eagle.conversations.messages import take_apart
from ray_eagle.conversations.prompts import load_rows
from ray_eagle.conversations.remote import answer_batches
from ray_eagle.conversations.states import import_conversations
from ray_eagle.conversations.template import injected_system
from ray_eagle.errors import InputError
from ray_eagle.lock import Lock
from ray_eagle.pool import ActorPool, Member, this_node
from ray_eagle.progress import Progress, Rate
from ray_eagle.run import Folder, RunFolder
from ray_eagle.stage import Outcome
from ray_eagle.target.attention import group_queries
from ray_eagle.target.generation import Decoder, Request, eos_ids
from ray_eagle.target.loading import TargetFacts, load_tokenizer, take_device
from ray_eagle.target.stage import load_model

CUT_SHORT = 1000
"""Conversations cut short that summary.json names."""


class Generator:
    """Holds the target and answers batches; the body of one actor."""

    def __init__(self, target: TargetConfig, facts: TargetFacts, settings: GenerateConfig, seed: int) -> None:
        self.settings = settings
        self.seed = seed
        self.tokenizer = load_tokenizer(facts, target)
        self.model = load_model(facts, target, take_device(settings.cpus, settings.gpus))
        group_queries(self.model)
        self.eos = eos_ids(self.model, self.tokenizer)
        # a repetition penalty of the model's own would make another text than the teacher's and the server's
        self.model.generation_config = GenerationConfig()
        self.context = facts.max_position_embeddings
        self.decoder = Decoder(
            self.model, eos=self.eos, slots=settings.batch_size, max_new_tokens=settings.max_new_tokens,
            temperature=settings.temperature, top_p=settings.top_p,
        )  # fmt: skip

    def ready(self) -> str:
        return this_node()

    def work(self, batch: Batch, without: frozenset[str] = frozenset()) -> Made:
        """Conversations and rejected prompts, in the order of the batch; multi-turn prompts are answered turn by turn.

        A batch cannot be taken apart, so nothing is ever left out (`without` is the pool's).
        """
        chats = [TokenChat(p, self.settings, self.tokenizer, frozenset(self.eos), self.context) for p in batch.prompts]
        waiting: deque[Request] = deque()
        for chat in chats:
            self._ask(chat, 0, waiting)
        for request, answer in self.decoder.run(waiting):
            chat, turn = request.owner
            chat.add(turn, request.ids, answer.ids, answer.finish_reason)
            self._ask(chat, turn + 1, waiting)
        made = [chat.made() for chat in chats]
        return [row for kept, _ in made for row in kept], [row for _, rejected in made for row in rejected]

    def _ask(self, chat: TokenChat, turn: int, waiting: deque[Request]) -> None:
        """Have the next answer of a conversation written, unless it is over."""
        ids = chat.ask(turn) if turn < len(chat.prompt.turns) else None
        if ids is not None:
            waiting.append(Request(ids, (chat, turn), f"{self.seed} {chat.prompt.id} {turn}"))


def generate(config: Config, run: RunFolder, facts: TargetFacts, progress: Progress) -> Outcome:
    """Conversations from the prompts or conversations of the input; write part-*.jsonl, rejected.jsonl and summary.json.

    What a committed part holds is not made again. Joins the cluster where it needs one, once the input is read. Raises
    InputError when no row of the input can be used, LockedError while another driver generates into this run.
    """
    folder = run.of("generate")
    with Lock(folder):
        if config.states.path:
            import_conversations(config, folder, facts, progress)
            return _finish(config, folder, facts, "", progress)
        tokenizer = load_tokenizer(facts, config.target)
        system, told = check_template_system(tokenizer, config.generate, progress), frozenset[str]()
        if config.generate.answers == "keep":
            progress.say(
                "generate: warning: keeping the answers of the file. Text that the target did not write trains a worse "
                "drafter; generate.answers: regenerate lets the target write it."
            )
            keep_answers(config, folder, facts, progress)
        else:
            told = _regenerate(config, folder, facts, tokenizer, progress)
        return _finish(config, folder, facts, system, progress, told)


def _finish(
    config: Config,
    folder: Folder,
    facts: TargetFacts,
    system: str,
    progress: Progress,
    told: frozenset[str] = frozenset(),
) -> Outcome:
    """summary.json, and what it says in words. `told`: splits that are known to be empty already."""
    made = {key: facts.fingerprint[key] for key in ("tokenizer", "chat_template")} | {"template_system": system}
    marks = config.generate.reasoning_marks
    summary = summarise(read_conversations(folder), folder.read_jsonl("rejected.jsonl"), marks) | made
    folder.write_json("summary.json", summary)
    for split in ("train", "validation"):
        if not summary[split]["conversations"] and split not in told:
            _warn_of_empty(split, "conversation", progress)
    progress.say(f"generate: {_in_words(summary)}")
    return Outcome(samples=summary["conversations"], tokens=summary["tokens"])


def check_template_system(tokenizer: Any, settings: GenerateConfig, progress: Progress) -> str:
    """The system text that the chat template writes unasked; tells of it, and of a date that it writes.

    Raises InputError when the settings refuse it.
    """
    system = injected_system(tokenizer)
    shown = " ".join(system.split())[:80]
    if system and settings.template_system == "refuse":
        raise InputError(
            f"chat template: expected no system text that nobody asked for, found {shown!r}. Give every row a system message, "
            "use another template, or set generate.template_system to keep, if the server renders this template too."
        )
    if system:
        progress.say(
            f"generate: the chat template writes a system text of its own ({shown!r}) where a row has none. It is kept: a "
            "server that renders this template writes it too."
        )
    if "strftime_now" in str(tokenizer.chat_template):
        progress.say(
            "generate: warning: the chat template writes the date of the day. Conversations rendered on another day begin "
            "otherwise: finish this stage on one day, or give every row a system message that states a date, if that replaces it."
        )
    return system


def _regenerate(
    config: Config, folder: Folder, facts: TargetFacts, tokenizer: Any, progress: Progress
) -> frozenset[str]:
    """Answer every prompt that no committed part holds yet. Returns the splits without a prompt, which are told."""
    settings = config.generate
    prompts, unusable = load_rows(settings)
    batches, too_long = plan_batches(prompts, tokenizer, settings, facts.max_position_embeddings)
    empty = {"train", "validation"} - {prompt.split for batch in batches for prompt in batch.prompts}
    for split in sorted(empty):
        _warn_of_empty(split, "prompt", progress)
    done = set(folder.names())
    waiting = [batch for batch in batches if part_name(batch.index) not in done]
    total = sum(len(batch.prompts) for batch in batches)
    progress.start("generate", total, "prompts", done=total - sum(len(batch.prompts) for batch in waiting))
    if waiting and settings.backend == "embedded":
        _answer_here(waiting, config, facts, folder, progress)
    elif waiting:
        answer_batches(waiting, settings, facts, tokenizer, config.seed, folder, progress)
    gather_rejected(folder, unusable + too_long)
    return frozenset(empty)


def _answer_here(waiting: list[Batch], config: Config, facts: TargetFacts, folder: Folder, progress: Progress) -> None:
    """On actors that hold the target."""
    import ray

    settings = config.generate
    connect(config.ray)
    ensure_resources({"CPU": settings.cpus, "GPU": settings.gpus}, settings.actors, config.ray.wait_s)
    actor = ray.remote(Generator)
    pool = ActorPool(
        lambda name: Member(
            actor.options(
                name=name,
                num_cpus=settings.cpus,
                num_gpus=settings.gpus,
                **marked(settings.gpus),
                max_restarts=0,
                max_task_retries=0,
            ).remote(config.target, facts, settings, config.seed)
        ),
        settings.actors,
        "eagle-generate",
    )
    rate = Rate(1)
    for batch, (rows, rejected) in pool.run(waiting):
        commit(folder, batch.index, rows, rejected)
        rate.advance(sum(end - start for row in rows for start, end in row["supervised"]))
        progress.advance(len(batch.prompts), f"{rate.per_second:,.0f} tok/s")


def _warn_of_empty(split: str, what: str, progress: Progress) -> None:
    why = {"train": "nothing to learn from", "validation": "nothing to choose a checkpoint by"}[split]
    progress.say(
        f"generate: warning: no {split} {what}, so training has {why}. See rejected.jsonl; add prompts or change the shares."
    )


def summarise(conversations: Iterable[Conversation], rejected: list[Any], marks: tuple[str, str]) -> dict[str, Any]:
    """Counts of rows, conversations, tokens, finish reasons, reasoning and rejections, in all and by split."""
    finish: Counter[str] = Counter()
    masks: Counter[str] = Counter()
    splits = {split: {"conversations": 0, "supervised_tokens": 0} for split in ("train", "validation", "held_out")}
    cut_short: dict[str, str] = {}
    rows = tokens = cut = before = answers = reasoned = 0
    for c in conversations:
        splits[c.split]["conversations"] += 1
        splits[c.split]["supervised_tokens"] += c.supervised_tokens
        rows += c.row == 0 or c.row != before  # a row's conversations stand together
        before = c.row
        tokens += len(c.input_ids)
        finish.update(c.finish_reasons)
        masks[c.mask] += 1
        if c.note:
            cut += 1
            if len(cut_short) < CUT_SHORT:
                cut_short[c.source_id] = c.note
        for message in c.messages:
            if message["role"] == "assistant":
                answers += 1
                reasoned += has_reasoning(message, marks)
    return {
        "rows": {"read": rows + len(rejected), "kept": rows, "rejected": len(rejected)},
        "conversations": sum(part["conversations"] for part in splits.values()),
        "rejected": len(rejected),
        "cut_short": cut_short,
        "cut_short_conversations": cut,
        "tokens": tokens,
        "supervised_tokens": sum(part["supervised_tokens"] for part in splits.values()),
        "finish_reasons": dict(finish),
        "masks": dict(masks),
        "answers": answers,
        "answers_with_reasoning": reasoned,
        **splits,
    }


def has_reasoning(message: dict[str, Any], marks: tuple[str, str]) -> bool:
    """Does an answer hold reasoning, apart or inside its text?"""
    return bool(message.get("reasoning_content") or take_apart(message["content"], marks)[0].strip())


def _in_words(summary: dict[str, Any]) -> str:
    rows = summary["rows"]
    reasoning = f"reasoning in {summary['answers_with_reasoning']:,} of {summary['answers']:,} answers"
    return (
        f"{rows['read']:,} rows: {rows['kept']:,} kept, {rows['rejected']:,} rejected (rejected.jsonl says why); "
        f"{summary['conversations']:,} conversations, {summary['supervised_tokens']:,} of {summary['tokens']:,} tokens "
        f"supervised; {reasoning}"
    )
