"""From messages to token ids through the target's own chat template, never re-tokenising what the target wrote."""

import json
from pathlib import Path
from typing import Any

from ray_eagle.errors import InputError

SENTINEL = "sentinel7919"
"""A text that no template writes by itself."""
SPECIAL = "\ue000"
"""Stands for any special token while texts are compared."""


def render_prompt(tokenizer: Any, user: str, system: str = "") -> list[int]:
    """Ids of a first user message with the generation prompt. No system prompt is added beyond the template's own."""
    before = [{"role": "system", "content": system}] if system else []
    text = _render(tokenizer, [*before, {"role": "user", "content": user}], generate=True)
    return _encode(tokenizer, text)


def render_next_turn(tokenizer: Any, messages: list[dict[str, str]], user: str, *, end_of_turn: str) -> list[int]:
    """Ids that follow the last answer's exact ids: its end of turn if it was cut, the user's message, the generation prompt.

    `messages` ends with that answer; `end_of_turn` is the text of the end-of-turn token that its ids already hold, empty if
    it was cut. Raises InputError when the template renders an earlier turn otherwise once a later one follows (it is not
    prefix-stable).
    """
    before = _render(tokenizer, messages[:-1], generate=True)
    answered = _render(tokenizer, messages, generate=False)
    longer = _render(tokenizer, [*messages, {"role": "user", "content": user}], generate=True)
    written = before + messages[-1]["content"]
    if not answered.startswith(written) or not longer.startswith(answered):
        raise InputError(
            f"chat template: turn {len(messages) // 2} renders otherwise once another turn follows, so the ids that the target "
            "wrote cannot be kept. Use single-turn prompts, or a template that only appends."
        )
    tail = longer[len(written) :]
    if not tail.startswith(end_of_turn):
        raise InputError(
            f"chat template: expected {end_of_turn!r} after an answer, found {tail[:20]!r}. Check the template."
        )
    return _encode(tokenizer, tail[len(end_of_turn) :])


def begins_to_reason(tokenizer: Any, mark: str) -> bool:
    """Does the generation prompt end with the mark that begins reasoning?"""
    text = _render(tokenizer, [{"role": "user", "content": "?"}], generate=True).rstrip()
    return bool(mark.strip()) and text.endswith(mark.strip())


def _render(tokenizer: Any, messages: list[dict[str, str]], *, generate: bool) -> str:
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=generate)


def _encode(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def stop_ids(path: Path, tokenizer: Any) -> list[int]:
    """Ids that end an answer, by the files of the target: generation_config.json, config.json and the tokenizer."""
    found = {tokenizer.eos_token_id}
    for name in ("generation_config.json", "config.json"):
        if (path / name).is_file():
            value = json.loads((path / name).read_text()).get("eos_token_id")
            found |= set(value) if isinstance(value, list) else {value}
    return sorted(i for i in found if i is not None)


def injected_system(tokenizer: Any) -> str:
    """The system text that the chat template writes when the messages have none; empty for most templates.

    What stands before a first user message, less what stands before a later one and less special tokens.
    """
    asked, said = SENTINEL + "u", SENTINEL + "a"
    user = {"role": "user", "content": asked}
    later = [{"role": "user", "content": "?"}, {"role": "assistant", "content": said}, user]
    try:
        first = tokenizer.apply_chat_template([user], tokenize=False)
        after = tokenizer.apply_chat_template(later, tokenize=False)
    except Exception:  # a template that refuses so plain a talk says so for every row
        return ""
    if asked not in first or said not in after or asked not in after:
        return ""
    begin, between = first[: first.index(asked)], after[after.rindex(said) + len(said) : after.rindex(asked)]
    for token in sorted(map(str, tokenizer.get_added_vocab()), key=len, reverse=True):
        begin, between = begin.replace(token, SPECIAL), between.replace(token, SPECIAL)
    rest = begin[: len(begin) - common_start(begin[::-1], between[::-1])].replace(SPECIAL, "\n")
    rest = "\n".join(line.strip() for line in rest.splitlines() if line.strip())
    return rest if any(c.isalnum() for c in rest) else ""


def common_start(one: str, other: str) -> int:
    """How many characters two texts begin with alike."""
    same = 0
    while same < min(len(one), len(other)) and one[same] == other[same]:
        same += 1
    return same
