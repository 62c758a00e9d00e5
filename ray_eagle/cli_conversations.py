"""`ray-eagle conversations show|stats`: look at what a run learns from. Parses and prints; no logic."""

import json
from collections import Counter

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ray_eagle.config import Config
from ray_eagle.conversations.conversation import Conversation, read_conversations
from ray_eagle.conversations.look import ConversationStats, pieces, stats
from ray_eagle.errors import InputError
from ray_eagle.run import Folder
from ray_eagle.target.loading import load_tokenizer, read_facts

SUPERVISED = "bold green"
PROMPT = "bright_black"
SPECIAL = "reverse"


def print_conversations(
    config: Config,
    folder: Folder,
    console: Console,
    *,
    number: int,
    only: str | None,
    split: str | None,
    ids: bool,
    json_output: bool,
) -> None:
    """Samples with supervised tokens coloured (in braces where there is no colour). Raises InputError without any."""
    shown: list[Conversation] = []
    others: Counter[str] = Counter()
    for conversation in read_conversations(folder):
        if only in (None, conversation.source_id) and split in (None, conversation.split):
            shown.append(conversation)
        else:
            others[conversation.split] += 1
        if len(shown) == number:
            break
    if not shown:
        raise InputError(_nothing(folder.path, only, split, others))
    if json_output:
        print(json.dumps({"conversations": [conversation.to_row() for conversation in shown]}, ensure_ascii=False))
        return
    tokenizer = load_tokenizer(read_facts(config.target), config.target)
    for conversation in shown:
        console.rule(_title(conversation), align="left", style="none")
        text = Text()
        for piece in pieces(conversation, tokenizer, ids=ids):
            style = SUPERVISED if piece.supervised else PROMPT
            mark = piece.supervised and console.color_system is None
            shown_text = f"{{{piece.text}}}" if mark else piece.text
            text.append(shown_text, style=f"{style} {SPECIAL}" if piece.special else style)
        console.print(text, soft_wrap=True)
        console.print()


def _nothing(path: str, only: str | None, split: str | None, others: Counter[str]) -> str:
    if not others:
        return f"{path}: expected conversations, found none. Run `ray-eagle generate` first."
    asked = (f" with id {only!r}" if only else "") + (f" in split {split!r}" if split else "")
    found = ", ".join(f"{name} {count:,}" for name, count in sorted(others.items()))
    fix = "Without --id and --split the first ones are shown, with their ids."
    return f"{path}: expected conversations{asked}, found others alone (splits: {found}). {fix}"


def _title(c: Conversation) -> str:
    counted = f"{c.supervised_tokens} of {len(c.input_ids)} tokens supervised"
    note = f" - {c.note}" if c.note else ""
    return f"{c.source_id} ({c.category}, {c.split}, {c.mask}; {', '.join(c.finish_reasons)}): {counted}{note}"


def print_stats(config: Config, folder: Folder, console: Console, *, json_output: bool) -> None:
    """Figures over all conversations of the folder. Raises InputError without any."""
    found = stats(read_conversations(folder), config.generate.reasoning_marks)
    if not found.conversations:
        raise InputError(f"{folder.path}: expected conversations, found none. Run `ray-eagle generate` first.")
    if json_output:
        print(json.dumps(found.model_dump()))
    else:
        console.print(_table(found))


def _table(found: ConversationStats) -> Table:
    def words(counts: dict[str, int]) -> str:
        return ", ".join(f"{name} {count:,}" for name, count in list(counts.items())[:20]) or "none"

    table = Table("conversations", f"{found.conversations:,}")
    table.add_row("tokens", f"{found.tokens:,}")
    table.add_row("supervised", f"{found.supervised_tokens:,} ({found.supervised_share:.1%})")
    table.add_row("length in tokens", words(found.lengths))
    table.add_row("supervised tokens of each", words(found.supervised_lengths))
    table.add_row("reasoning", f"{found.answers_with_reasoning:,} of {found.answers:,} answers")
    table.add_row("splits", words(found.splits))
    table.add_row("categories", words(found.categories))
    table.add_row("finish reasons", words(found.finish_reasons))
    table.add_row("mask from", words(found.masks))
    table.add_row("duplicates", f"{found.duplicates:,}")
    return table
