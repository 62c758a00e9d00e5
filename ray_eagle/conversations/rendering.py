"""Whole conversations as the text that a chat template makes of them, reasoning and tool calls included."""

import re
from typing import Any, Literal

from ray_eagle.conversations.messages import Message, RowError
from ray_eagle.conversations.template import SENTINEL

GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


class ChatTemplate:
    """A tokenizer's chat template, and how it is to be given reasoning: found out by rendering.

    `marks` enclose reasoning where the template itself does not know it.
    """

    def __init__(self, tokenizer: Any, marks: tuple[str, str]) -> None:
        self.tokenizer = tokenizer
        self.marks = marks
        self.has_blocks = bool(GENERATION.search(str(tokenizer.chat_template)))
        """Does it mark what the assistant writes?"""
        self.knows_calls = "tool_calls" in str(tokenizer.chat_template)
        """Does it read what an assistant calls?"""
        self.around_reasoning = marks
        """What stands before and after reasoning in the text."""
        self.reasoning_way: Literal["template", "content", "nobody"] = "template"
        """Who writes reasoning: the `template`; the `content`, marked; or `nobody`: the template cuts it out of past answers."""
        self.beside_calls: str | None = ""
        """Content of a message that only calls tools: some templates write calls only where there is none."""
        self._find_reasoning_way()
        self._find_beside_calls()

    def render(self, messages: list[Message], tools: list[Any] | None, *, generate: bool, turn: int) -> str:
        """The text, with the generation prompt at its end if asked. Raises RowError, naming the turn, with what the template says."""
        try:
            return self.tokenizer.apply_chat_template(
                self.for_template(messages), tools=tools or None, tokenize=False, add_generation_prompt=generate
            )
        except Exception as error:  # templates raise what they like
            raise RowError(f"turn {turn}: the chat template refuses it ({type(error).__name__}: {error})") from None

    def render_blocks(self, messages: list[Message], tools: list[Any] | None) -> tuple[str, list[tuple[int, int]]]:
        """The text, and [start, end) of what the template marks as the assistant's, in characters. Raises RowError."""
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            texts, blocks = render_jinja_template(
                [self.for_template(messages)],
                tools=tools or None,
                chat_template=self.tokenizer.get_chat_template(tools=tools or None),
                return_assistant_tokens_mask=True,
                add_generation_prompt=False,
                **self.tokenizer.special_tokens_map,
            )
        except Exception as error:
            raise RowError(f"the chat template refuses it ({type(error).__name__}: {error})") from None
        return texts[0], blocks[0]

    def for_template(self, messages: list[Message]) -> list[Message]:
        """Reasoning under every name that templates read, or marked in the content where the template reads none."""
        rendered = []
        for message in messages:
            reasoning = message.get("reasoning_content")
            if reasoning and self.reasoning_way == "content":
                message = {**message, "content": self.marks[0] + reasoning + self.marks[1] + message["content"]}
                del message["reasoning_content"]
            elif reasoning:
                message = {**message, "reasoning": reasoning, "thinking": reasoning}
            if message.get("tool_calls") and not message["content"]:
                message = {**message, "content": self.beside_calls}
            rendered.append(message)
        return rendered

    def _find_reasoning_way(self) -> None:
        thought, said = SENTINEL + "r", SENTINEL + "a"
        user, answer = (
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": said, "reasoning_content": thought},
        )
        ways: tuple[Literal["template", "content"], ...] = ("template", "content")
        try:
            asked = self.render([user], None, generate=True, turn=1)
            for self.reasoning_way in ways:
                text = self.render([user, answer], None, generate=False, turn=1)
                if -1 < text.find(thought) < text.find(said):
                    if self.reasoning_way == "template":
                        begin = text[: text.find(thought)]
                        end = text[text.find(thought) + len(thought) : text.find(said)]
                        self.around_reasoning = (begin.removeprefix(asked) if begin.startswith(asked) else "", end)
                    return
        except RowError:  # said again, with the turn, for every row
            self.reasoning_way = "content"
            return
        self.reasoning_way = "nobody"

    def _find_beside_calls(self) -> None:
        call = {"type": "function", "function": {"name": SENTINEL, "arguments": {}}}
        talk: list[Message] = [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
        ]
        for self.beside_calls in ("", None):
            try:
                if SENTINEL in self.render(talk, None, generate=False, turn=1):
                    return
            except RowError:  # with tools alone, or never
                continue
        self.beside_calls = ""
