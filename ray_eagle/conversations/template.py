"""From messages to token ids through the target's own chat template, never re-tokenising what the target wrote."""

from typing import Any

from ray_eagle.errors import InputError


def render_prompt(tokenizer: Any, user: str) -> list[int]:
    """Ids of a first user message with the generation prompt. No system prompt is added beyond the template's own."""
    text = _render(tokenizer, [{"role": "user", "content": user}], generate=True)
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


def _render(tokenizer: Any, messages: list[dict[str, str]], *, generate: bool) -> str:
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=generate)


def _encode(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]
