"""What a streamed answer or probe says, one JSON object a line (application/x-ndjson), `kind` first.

POST /generate with `Accept: application/x-ndjson`: `start`, a `pass` for each verification, `reply` (the same as without
streaming). POST /probe: `progress` for each prompt, then `report`. A stream that breaks ends with `error` instead.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal

from ray_eagle.probing.reports import ProbeReport
from ray_eagle.serving.generation import VerifyPass
from ray_eagle.serving.messages import GenerateReply, Message

NDJSON = "application/x-ndjson"
TAIL = 6
"""Tokens of the prompt that are decoded along, so that the first piece keeps its leading space."""
PENDING = 4
"""A character of UTF-8 has at most so many bytes: what is still broken after as many tokens stays broken."""
BROKEN = "\ufffd"


class Piece(Message):
    """One token and its own text. A character of several tokens belongs to the last of them."""

    id: int
    text: str
    special: bool


class Started(Message):
    kind: Literal["start"] = "start"
    prompt_length: int
    live: bool
    """Whether each pass comes when it is made. Else all come at the end, with their typical time."""


class Passed(Message):
    """One verify pass; without drafts (plain decoding, and the prefill's token) it is the bonus token alone."""

    kind: Literal["pass"] = "pass"
    drafted: list[Piece]
    """All drafts where the engine tells them (reference), else those that were accepted."""
    accepted: int
    bonus: Piece | None
    """None where it lies beyond the answer's end and the engine does not tell it."""
    beyond: int
    """So many of the accepted and the bonus lie beyond the answer's end."""
    seconds: float
    tokens: int
    """Of the answer so far."""
    acceptance_length: float | None
    """Of the passes so far, this one included; None before the first with drafts."""
    tokens_per_second: float | None
    """So far, the prefill left out; None before the first pass after it."""


class Replied(Message):
    kind: Literal["reply"] = "reply"
    reply: GenerateReply


class Progressed(Message):
    kind: Literal["progress"] = "progress"
    done: int
    total: int
    note: str


class Reported(Message):
    kind: Literal["report"] = "report"
    report: ProbeReport


class Failed(Message):
    """The last line of a stream that broke."""

    kind: Literal["error"] = "error"
    error: str


Line = Started | Passed | Replied | Progressed | Reported | Failed
Emit = Callable[[Line], None]


class Pieces:
    """Token by token to text: what each adds to the text of those before it."""

    def __init__(self, tokenizer: Any, before: Sequence[int]) -> None:
        """`before`: the tokens that precede, of which the last few are kept."""
        self._tokenizer = tokenizer
        self._special = frozenset(tokenizer.all_special_ids)
        self._settled, self._pending = list(before[-TAIL:]), list[int]()

    def add(self, token: int) -> Piece:
        """The next token of the text."""
        self._pending.append(token)
        known = self._decode(self._settled)
        text = self._decode(self._settled + self._pending)
        if text.endswith(BROKEN) and len(self._pending) < PENDING:
            return Piece(id=token, text="", special=token in self._special)
        self._settled, self._pending = (self._settled + self._pending)[-TAIL:], []
        return Piece(id=token, text=text[len(known) :], special=token in self._special)

    def peek(self, tokens: Sequence[int]) -> list[Piece]:
        """Pieces of tokens that might follow; nothing is kept."""
        ahead = Pieces(self._tokenizer, ())
        ahead._settled, ahead._pending = list(self._settled), list(self._pending)
        return [ahead.add(token) for token in tokens]

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)


class Narrator:
    """Turns the passes of one answer into lines, with running figures."""

    def __init__(
        self, tokenizer: Any, prompt: Sequence[int], limit: int, eos_ids: frozenset[int] = frozenset()
    ) -> None:
        """The answer ends after `limit` tokens, or with one of `eos_ids`."""
        self._pieces = Pieces(tokenizer, prompt)
        self._left, self._eos_ids = limit, eos_ids
        self._tokens = self._passes = self._accepted = 0
        self._seconds, self._first = 0.0, True

    def tell(self, made: VerifyPass, seconds: float) -> Passed:
        """The line of the next pass. The first is the prefill's, whose time counts nowhere."""
        rejected = self._pieces.peek(made.drafted)[made.accepted :]
        kept = [self._pieces.add(token) for token in made.drafted[: made.accepted]]
        bonus = self._pieces.add(made.bonus) if made.bonus >= 0 else None
        inside = self._inside([piece.id for piece in (*kept, *([bonus] if bonus else []))])
        self._tokens += inside
        if made.drafted or made.accepted:
            self._passes, self._accepted = self._passes + 1, self._accepted + made.accepted
        if not self._first:
            self._seconds += seconds
        rate = None if self._first or not self._seconds else (self._tokens - 1) / self._seconds
        self._first = False
        return Passed(
            drafted=kept + rejected,
            accepted=made.accepted,
            bonus=bonus,
            beyond=len(kept) + (bonus is not None) - inside,
            seconds=seconds,
            tokens=self._tokens,
            acceptance_length=1 + self._accepted / self._passes if self._passes else None,
            tokens_per_second=rate,
        )

    def _inside(self, ids: Sequence[int]) -> int:
        """How many of the next tokens belong to the answer: up to its limit, and to its end of sequence."""
        count = 0
        for token in ids:
            if self._left < 1:
                break
            count, self._left = count + 1, self._left - 1
            if token in self._eos_ids:
                self._left = 0
        return count
