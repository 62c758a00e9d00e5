"""A conversation while the target writes it: in exact token ids, or in text that becomes ids when it is over."""

from typing import Any

from ray_eagle.config import GenerateConfig
from ray_eagle.conversations.backends.dialects import Finish, TextAnswer
from ray_eagle.conversations.conversation import Conversation
from ray_eagle.conversations.keep import conversations_of
from ray_eagle.conversations.mask import Renderer
from ray_eagle.conversations.messages import Message, RowError, checked, take_apart
from ray_eagle.conversations.prompts import Prompt
from ray_eagle.conversations.template import render_next_turn, render_prompt
from ray_eagle.errors import InputError

Made = tuple[list[dict[str, Any]], list[dict[str, Any]]]
"""Rows of conversations, and rejected rows with their reason."""


class _Talk:
    """What both kinds share: the prompt, and why it ended early."""

    def __init__(self, prompt: Prompt, settings: GenerateConfig) -> None:
        self.prompt, self.settings = prompt, settings
        self.messages: list[Message] = [{"role": "system", "content": prompt.system}] if prompt.system else []
        self.reason = ""
        """Why nothing more is asked."""
        self.note = ""

    def end(self, turn: int, reason: str) -> None:
        """Nothing from this turn on; what was answered before is kept."""
        self.reason = reason
        self.note = f"ended before turn {turn + 1}: {reason}"

    def _drops(self, turn: int, finish: Finish) -> bool:
        if finish == "length" and self.settings.drop_cut:
            self.end(turn, f"the answer was cut at {self.settings.max_new_tokens} tokens (generate.drop_cut)")
            return True
        return False

    def _rejected(self) -> list[dict[str, Any]]:
        return [{"row": self.prompt.row, "source_id": self.prompt.id, "reason": self.reason}]


class TokenChat(_Talk):
    """In exact ids: what the target wrote is never tokenized again."""

    def __init__(
        self, prompt: Prompt, settings: GenerateConfig, tokenizer: Any, stops: frozenset[int], context: int
    ) -> None:
        super().__init__(prompt, settings)
        self._tokenizer, self._stops, self._context = tokenizer, stops, context
        self.ids: list[int] = []
        self.supervised: list[list[int]] = []
        self.finish_reasons: list[str] = []

    def ask(self, turn: int) -> list[int] | None:
        """Ids that the target goes on from; None when the conversation ended, or ends here, with the reason."""
        if self.reason:
            return None
        user = self.prompt.turns[turn]
        if not turn:
            return render_prompt(self._tokenizer, user, self.prompt.system)
        try:
            ended = self._tokenizer.decode(self.ids[-1:]) if self.ids[-1] in self._stops else ""
            ids = self.ids + render_next_turn(self._tokenizer, self.messages, user, end_of_turn=ended)
        except InputError as error:
            self.end(turn, str(error))
            return None
        if len(ids) + self.settings.max_new_tokens > self._context:
            self.end(turn, f"it would pass the target's context of {self._context} tokens")
            return None
        return ids

    def add(self, turn: int, asked: list[int], answer: list[int], finish: Finish) -> None:
        if self._drops(turn, finish):
            return
        self.ids = asked + answer
        self.supervised.append([len(asked), len(self.ids)])
        self.finish_reasons.append(finish)
        written = answer[:-1] if answer[-1] in self._stops else answer
        self.messages += [
            {"role": "user", "content": self.prompt.turns[turn]},
            {"role": "assistant", "content": self._tokenizer.decode(written)},
        ]

    def made(self) -> Made:
        if not self.supervised:
            return [], self._rejected()
        p, first = self.prompt, -1 if self.settings.turns == "last" else 0
        spans, reasons = self.supervised[first:], self.finish_reasons[first:]
        conversation = Conversation(
            p.id, p.category, p.split, self.messages, self.ids, spans, reasons, self.note, row=p.row
        )
        return [conversation.to_row()], []


class TextChat(_Talk):
    """In text, as OpenAI's API returns it. Ids and mask are the server's own where it returns ids, else as of kept answers."""

    def __init__(self, prompt: Prompt, settings: GenerateConfig, begun: bool) -> None:
        """`begun`: the generation prompt begins to reason already."""
        super().__init__(prompt, settings)
        self._begun = begun
        self._sent = list(self.messages)
        self.answers: list[TextAnswer] = []

    def ask(self, turn: int) -> list[Message] | None:
        """Messages to send; None when the conversation ended."""
        if self.reason:
            return None
        return [*self._sent, {"role": "user", "content": self.prompt.turns[turn]}]

    def add(self, turn: int, asked: list[Message], answer: TextAnswer) -> None:
        """Reasoning is sent back under the server's own name for it. Raises RowError for an empty answer."""
        if self._drops(turn, answer.finish):
            return
        content, reasoning = answer.content, answer.reasoning
        message = answer_of(content, reasoning, answer.finish, self.settings.reasoning_marks, self._begun)
        self.messages += [asked[-1], message]
        apart = {answer.reasoning_name: reasoning} if reasoning else {}
        self._sent = [*asked, {"role": "assistant", "content": content, **apart}]
        self.answers.append(answer)
        if answer.finish == "length" and not message["content"] and turn + 1 < len(self.prompt.turns):
            self.end(turn + 1, f"the answer before was cut in its reasoning, at {self.settings.max_new_tokens} tokens")

    def made(self, renderer: Renderer, stops: frozenset[int], context: int) -> Made:
        """Conversations with ids and mask; several with `turns: split`."""
        if not self.answers:
            return [], self._rejected()
        said = [i for i, message in enumerate(self.messages) if message["role"] == "assistant"]
        made = self._exact(said, stops, context)
        if made is None:
            cut = frozenset(i for i, a in zip(said, self.answers, strict=True) if a.finish == "length")
            try:
                made = list(conversations_of(renderer, self.messages, [], self.settings, context, cut=cut))
            except RowError as error:
                self.reason = str(error)
                return [], self._rejected()
        p = self.prompt
        made[0][1]["note"] = "; ".join(filter(None, (self.note, made[0][1].get("note", ""))))
        return [Conversation(p.id + suffix, p.category, p.split, row=p.row, **v).to_row() for suffix, v in made], []

    def _exact(self, said: list[int], stops: frozenset[int], context: int) -> list[tuple[str, dict[str, Any]]] | None:
        """Suffixes and fields of conversations in the server's own ids; None where they do not do.

        The prompt of a turn begins with all that was read and written before, unless the template changes earlier turns, or a
        tokenizer writes an earlier answer otherwise. With `split` such an answer gets a conversation of its own.
        """
        settings, turns = self.settings, []
        if settings.reasoning != "keep" or not settings.supervise_reasoning:
            return None
        for answer in self.answers:
            if not answer.prompt_ids or not answer.ids or (answer.finish == "stop" and answer.ids[-1] not in stops):
                return None
            turns.append((len(answer.prompt_ids), answer.prompt_ids + answer.ids))
        made: list[tuple[str, dict[str, Any]]] = []
        left = list(range(len(turns)))
        while left:
            last = left[-1]
            whole = turns[last][1]
            covered = [t for t in left if whole[: len(turns[t][1])] == turns[t][1]]
            left = [t for t in left if t not in covered]
            if len(whole) > context or (left and settings.turns == "all"):
                return None  # the other way says what is wrong with it
            learnt = [last] if settings.turns == "last" else covered
            fields = {
                "messages": self.messages[: said[last] + 1],
                "input_ids": whole,
                "supervised": [[turns[t][0], len(turns[t][1])] for t in learnt],
                "finish_reasons": [self.answers[t].finish for t in learnt],
            }
            made.append((f"#turn{last + 1}" if made else "", fields))
            if settings.turns == "last":
                break
        return made


def answer_of(content: str, reasoning: str, finish: Finish, marks: tuple[str, str], begun: bool) -> Message:
    """An answer with its reasoning apart, also where the server left both in one text. Raises RowError for an empty one.

    `begun`: the prompt holds the begin mark already, so the text may hold the end mark alone. A cut text may hold no end mark.
    """
    begin, end = (mark.strip() for mark in marks)
    if not reasoning and begin and end:
        inside = begun or content.lstrip().startswith(begin)
        text = content.lstrip().removeprefix(begin) if inside else content
        if inside and end in text:
            reasoning, content = take_apart(begin + text, marks)
        elif inside and finish == "length":
            reasoning, content = text.strip("\n"), ""
    return checked({"role": "assistant", "content": content, "reasoning_content": reasoning}, marks)
