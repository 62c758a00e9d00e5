"""From whole conversations to token ids and a supervised mask, as the target would have written them. Pure.

Where the chat template marks what the assistant writes ({% generation %}), its marks are taken. Else the mask comes from rendering:
an answer is what stands between the generation prompt after the messages before it, and its end-of-turn mark. That is only
true while the template renders these messages alike whatever follows; it is checked for each answer, and a template that does
not is refused, naming the turn, or (`split`) gives that answer a sample of its own, which ends with it.

In both ways a span ends with the end-of-turn mark when the template writes one, and with nothing after it. Ids are those of the
whole text; where a token would cross from what the server feeds into what the target writes, both sides are encoded apart, as
they are when an answer is generated.
"""

import json
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from ray_eagle.conversations.messages import Message, Reasoning, RowError, keep_reasoning
from ray_eagle.conversations.rendering import ChatTemplate
from ray_eagle.conversations.template import SENTINEL, common_start

Turns = Literal["all", "last", "split"]


@dataclass(frozen=True)
class Sample:
    """Token ids and mask of a conversation, or of its beginning up to an answer."""

    messages: list[Message]
    input_ids: list[int]
    supervised: list[list[int]]
    """[start, end) spans of `input_ids`."""
    ended: list[bool]
    """Of each supervised answer: does its span hold an end-of-turn mark?"""
    cut: list[bool]
    """Of each: did the target not end it itself? Then its span ends with its text."""
    method: Literal["template", "rendering"]
    turn: int
    """Number of its last answer, from 1."""


@dataclass(frozen=True)
class _Span:
    """What the assistant wrote, in characters of the text; `thought` is where its reasoning ends (start: it has none)."""

    start: int
    end: int
    thought: int


class Renderer:
    """Token ids and masks of conversations, by one tokenizer. `marks` enclose reasoning where the template knows none."""

    def __init__(self, tokenizer: Any, stops: list[int], marks: tuple[str, str]) -> None:
        self.tokenizer = tokenizer
        self.template = ChatTemplate(tokenizer, marks)
        self.stops = [text for text in (tokenizer.decode([i], skip_special_tokens=False) for i in stops) if text]

    def samples(
        self,
        messages: list[Message],
        tools: list[Any] | None = None,
        *,
        turns: Turns = "all",
        reasoning: Reasoning = "keep",
        supervise_reasoning: bool = True,
        cut: frozenset[int] = frozenset(),
    ) -> list[Sample]:
        """One sample, or several with `split`, the last turn's first. `messages` ends with an answer.

        `cut`: numbers of answers that were cut off; what the template writes behind their text, the target did not.

        Raises RowError, naming the turn, for what cannot be rendered or masked truly.
        """
        answers = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
        self._refuse_stops_inside(messages, answers)
        if turns != "split":
            chosen = keep_reasoning(messages, reasoning)
            only = answers[-1:] if turns == "last" else answers
            return [self._sample(chosen, tools, only, answers, supervise_reasoning, cut, strict=True)[0]]
        found, left = [], list(answers)
        while left:
            prefix = keep_reasoning(messages[: left[-1] + 1], reasoning)
            known = [i for i in answers if i <= left[-1]]
            sample, covered = self._sample(prefix, tools, left, known, supervise_reasoning, cut, strict=False)
            found.append(sample)
            left = [i for i in left if i not in covered]
        return found

    def _sample(
        self,
        messages: list[Message],
        tools: list[Any] | None,
        wanted: list[int],
        answers: list[int],
        supervise_reasoning: bool,
        cut: frozenset[int],
        *,
        strict: bool,
    ) -> tuple[Sample, list[int]]:
        """A sample that ends with the last answer, and which of the wanted answers it supervises."""
        covered = list(wanted)
        if self.template.has_blocks and strict and not cut:
            method: Literal["template", "rendering"] = "template"
            text, spans = self._by_blocks(messages, tools, wanted, answers)
        else:
            method = "rendering"
            text, spans, covered = self._by_rendering(messages, tools, wanted, answers, strict)
        if not spans:
            raise RowError("no supervised token: the chat template marks nothing that the assistant wrote")
        cuts = [False] * len(spans)
        if cut:  # then spans are from rendering, one an answer
            cuts = [i in cut for i in covered]
            turns = [answers.index(i) + 1 for i in covered]
            of_spans = zip(spans, covered, turns, strict=True)
            spans = [self._cut_short(text, span, messages[i], t) if i in cut else span for span, i, t in of_spans]
        text = text[: spans[-1].end]
        ids, edges = self._encode(text, spans)
        supervised, ended, was_cut = [], [], []
        for span, (start, end), one in zip(spans, edges, cuts, strict=True):
            if not supervise_reasoning and span.thought > span.start:
                start += self._tokens_before(ids[start:end], text[span.start : span.end], span.thought - span.start)
            if start < end:
                supervised.append([start, end])
                ended.append(any(text[: span.end].endswith(stop) for stop in self.stops))
                was_cut.append(one)
        if not supervised:
            raise RowError("no supervised token: the answers are empty")
        turn = answers.index(covered[-1]) + 1
        return Sample(messages, ids, supervised, ended, was_cut, method, turn), covered

    # --- where the answers are -------------------------------------------------------------------------------------------

    def _by_rendering(
        self, messages: list[Message], tools: list[Any] | None, wanted: list[int], answers: list[int], strict: bool
    ) -> tuple[str, list[_Span], list[int]]:
        last = wanted[-1]
        whole = self._asked_and_written(messages, last, tools, answers.index(last) + 1)
        full = "".join(whole)
        spans, covered = [], []
        for i in wanted:
            turn = answers.index(i) + 1
            try:
                before, written = whole if i == last else self._asked_and_written(messages, i, tools, turn)
                if not full.startswith(before + written):
                    raise RowError(self._unstable(turn))
            except RowError:
                if strict:
                    raise
                continue  # it ends a sample of its own
            start, end = len(before), len(before) + len(written)
            if not any(written.endswith(stop) for stop in self.stops):  # then the next turn's mark may end this one
                end += next((len(stop) for stop in self.stops if full.startswith(stop, end)), 0)
            spans.append(_Span(start, end, start + self._thought(written, messages[i], turn)))
            covered.append(i)
        return full, spans, covered

    def _asked_and_written(
        self, messages: list[Message], i: int, tools: list[Any] | None, turn: int
    ) -> tuple[str, str]:
        """What the target is fed to say message i, nothing after it being known yet, and what it then writes."""
        message = messages[i]
        before = self.template.render(messages[:i], tools, generate=True, turn=turn)
        reasoning = message.get("reasoning_content", "")
        if reasoning and self.template.reasoning_way == "nobody":
            plain = {key: value for key, value in message.items() if key != "reasoning_content"}
            rendered = self.template.render([*messages[:i], plain], tools, generate=False, turn=turn)
            marked = self.template.render(
                [*messages[:i], {**plain, "content": SENTINEL}], tools, generate=False, turn=turn
            )
            place = marked.rfind(SENTINEL)
            if place < 0 or rendered[:place] != marked[:place]:
                raise RowError(f"turn {turn}: it is not known where the chat template puts the answer's text")
            begin, end = self.template.marks
            if before.rstrip().endswith(begin.strip()):  # the generation prompt has begun it
                begin = ""
            return before, begin + reasoning + end + self._cut(rendered[place:])
        answered = self.template.render(messages[: i + 1], tools, generate=False, turn=turn)
        if not answered.startswith(before):
            begin = self.template.marks[0].strip()
            if begin and before.rstrip().endswith(begin) and not reasoning:
                raise RowError(f"turn {turn}: the generation prompt begins to reason, and this answer has no reasoning")
            raise RowError(
                f"turn {turn}: the chat template renders the answer otherwise than after its generation prompt, so what the "
                f"target writes is not known (expected {before[-30:]!r} before it)"
            )
        return before, self._cut(answered[len(before) :])

    def _by_blocks(
        self, messages: list[Message], tools: list[Any] | None, wanted: list[int], answers: list[int]
    ) -> tuple[str, list[_Span]]:
        text, blocks = self.template.render_blocks(messages, tools)
        spans: list[_Span] = []
        for start, end in blocks:
            stop = self._first_stop(text, start, end)
            if stop is not None:
                end = stop
            else:
                end += next((len(mark) for mark in self.stops if text.startswith(mark, end)), 0)
            if start < end and (not spans or start >= spans[-1].end):
                spans.append(_Span(start, end, start))
        if len(wanted) < len(answers):
            before = self.template.render(messages[: wanted[0]], tools, generate=True, turn=len(answers))
            if len(spans) == len(answers):
                spans = spans[-len(wanted) :]
            elif text.startswith(before):
                spans = [span for span in spans if span.end > len(before)]
            else:
                raise RowError(
                    f"turn {len(answers)}: it is not known which of the template's marks are the last turn's"
                )
        thoughts = [0] * len(spans)
        if len(spans) == len(wanted):
            of_spans = zip(spans, wanted, strict=True)
            thoughts = [self._thought(text[s.start : s.end], messages[i], answers.index(i) + 1) for s, i in of_spans]
        elif spans:  # several marks an answer: reasoning can be seen to be there, but not taken out
            for i in wanted:
                self._thought(text, messages[i], answers.index(i) + 1)
        spans = [_Span(span.start, span.end, span.start + n) for span, n in zip(spans, thoughts, strict=True)]
        return text, spans

    def _cut(self, text: str) -> str:
        """Through the first end-of-turn mark; whole without one."""
        end = self._first_stop(text, 0, len(text))
        return text if end is None else text[:end]

    def _cut_short(self, text: str, span: _Span, message: Message, turn: int) -> _Span:
        """Only through what an answer that was cut off says: its text, or where it has none its reasoning."""
        written, said = text[span.start : span.end], message["content"]
        if said.strip():
            stop = next((stop for stop in self.stops if written.endswith(stop)), "")
            kept = written.removesuffix(stop).rstrip()
            if not kept.endswith(said.rstrip()):
                raise RowError(f"turn {turn}: it was cut off, and the chat template writes more behind its text")
            behind = len(said) - len(said.rstrip())
            end = len(kept) + common_start(written[len(kept) :], said[len(said) - behind :])
        else:
            said, begin = message.get("reasoning_content", "").strip(), self.template.around_reasoning[0].rstrip()
            end = written.index(said, len(begin) if written.startswith(begin) else 0) + len(said)
        return _Span(span.start, span.start + end, min(span.thought, span.start + end))

    def _first_stop(self, text: str, start: int, end: int) -> int | None:
        """Where the first end-of-turn mark inside [start, end) ends."""
        found = [(text.find(stop, start, end), len(stop)) for stop in self.stops]
        first = min(((at, -length) for at, length in found if at >= 0), default=None)
        return None if first is None else first[0] - first[1]

    def _thought(self, written: str, message: Message, turn: int) -> int:
        """Characters of `written` that are reasoning with its marks: up to the answer's text. 0 without reasoning.

        Raises RowError when the template left out a part of the answer.
        """
        reasoning = message.get("reasoning_content", "").strip()
        names = [call["function"]["name"] for call in message.get("tool_calls", [])]
        if not all(name in written for name in names):
            if not self.template.knows_calls:
                raise RowError(
                    f"turn {turn}: the chat template knows no tool calls and drops this one. Leave the row out"
                )
            raise RowError(
                f"turn {turn}: the chat template drops its tool call. Give the row its tools where it has none, or leave it out"
            )
        if message["content"].strip() not in written:
            raise RowError(f"turn {turn}: the chat template drops or changes the answer's text")
        if not reasoning:
            return 0
        begin, end = self.template.around_reasoning
        at = written.find(reasoning, len(begin.rstrip()) if written.startswith(begin.rstrip()) else 0)
        if at < 0:
            raise RowError(
                f"turn {turn}: the chat template drops its reasoning. Set generate.turns to split, or drop it"
            )
        after = at + len(reasoning)
        after += len(written) - after - len(written[after:].lstrip())
        return after + common_start(written[after:], end.lstrip())

    def _unstable(self, turn: int) -> str:
        return (
            f"turn {turn}: the chat template renders it otherwise once another turn follows, so the target never wrote it in "
            "this place. Set generate.turns to split (a sample for each such answer) or last"
        )

    def _refuse_stops_inside(self, messages: list[Message], answers: list[int]) -> None:
        for turn, i in enumerate(answers, 1):
            texts = [messages[i]["content"], messages[i].get("reasoning_content", "")]
            texts.append(json.dumps(messages[i].get("tool_calls", ""), ensure_ascii=False))
            mark = next((stop for stop in self.stops for text in texts if stop in text), None)
            if mark:
                raise RowError(f"turn {turn}: the answer holds the end-of-turn mark {mark!r}, which would end it")

    # --- tokens ----------------------------------------------------------------------------------------------------------

    def _encode(self, text: str, spans: list[_Span]) -> tuple[list[int], list[tuple[int, int]]]:
        """Ids of `text`, and the spans in tokens. Raises RowError when a tokenizer allows no such cut."""
        edges = sorted({0, len(text), *(s.start for s in spans), *(s.end for s in spans)})
        pieces = [self._ids(text[a:b]) for a, b in pairwise(edges)]
        whole = self._ids(text)
        ids = [i for piece in pieces for i in piece]
        counts = [0]
        for piece in pieces:
            counts.append(counts[-1] + len(piece))
        if ids != whole:
            prefixes = [self._ids(text[:edge]) for edge in edges]
            if all(whole[: len(prefix)] == prefix for prefix in prefixes):
                ids, counts = whole, [len(prefix) for prefix in prefixes]
            elif self._text(ids) != self._text(whole):
                raise RowError(
                    "the tokenizer writes an answer otherwise alone than inside the conversation, so it has no mask"
                )
        where = dict(zip(edges, counts, strict=True))
        return ids, [(where[s.start], where[s.end]) for s in spans]

    def _tokens_before(self, ids: list[int], text: str, edge: int) -> int:
        """How many of the ids of `text` lie wholly before a character; a token across it counts as after."""
        count = min(len(ids), len(self._ids(text[:edge])))
        while count and not text[:edge].startswith(self._text(ids[:count])):
            count -= 1
        return count

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"] if text else []

    def _text(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
