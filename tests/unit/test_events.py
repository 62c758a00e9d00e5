"""Tokens to text and passes to lines: against the whole text decoded at once, and by hand."""

from collections.abc import Sequence

import pytest
import torch

from ray_eagle.serving.events import BROKEN, Narrator, Passed, Pieces
from ray_eagle.serving.generation import VerifyPass
from tests.tiny import VOCAB, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
END = TOKENIZER.eos_token_id


def ids(text: str) -> list[int]:
    return TOKENIZER(text).input_ids


@pytest.mark.parametrize("text", ["plain words", "Grüße, 世界! 🎉🎉 done", "\n\n tabs\tand  spaces ", "é" * 9])
def test_pieces_add_up_to_the_text_and_never_break_a_character(text: str) -> None:
    pieces = Pieces(TOKENIZER, ids("before: "))
    found = [pieces.add(token) for token in ids(text)]
    assert "".join(piece.text for piece in found) == text
    assert not any(BROKEN in piece.text for piece in found)
    assert [piece.id for piece in found] == ids(text)


def test_bytes_that_are_no_text_do_not_hold_back_what_follows() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        tokens = torch.randint(0, 256, (40,), generator=generator).tolist() + ids("end")
        pieces = Pieces(TOKENIZER, ())
        assert "".join(pieces.add(token).text for token in tokens).endswith("end")


def test_peeking_keeps_nothing() -> None:
    pieces = Pieces(TOKENIZER, ids("x"))
    first, second, *_ = ids("ß")
    pieces.add(first)
    assert [piece.text for piece in pieces.peek([second, *ids("!")])] == ["ß", "!"]
    assert [piece.text for piece in pieces.peek(ids("?"))] == [f"{BROKEN}?"]
    assert pieces.add(second).text == "ß"


def test_special_tokens_are_shown_and_marked() -> None:
    piece = Pieces(TOKENIZER, ()).add(END)
    assert (piece.text, piece.special) == ("<|end|>", True)


def tell(passes: Sequence[VerifyPass], limit: int = 100) -> list[Passed]:
    narrator = Narrator(TOKENIZER, ids("prompt"), limit, frozenset({END}))
    return [narrator.tell(made, 0.5) for made in passes]


def test_figures_run_along() -> None:
    a, b, c, d = ids("abcd")
    lines = tell([VerifyPass(4, [], 0, a), VerifyPass(5, [b, c, d], 2, d), VerifyPass(8, [a, b, c], 0, b)])
    prefill, first, second = lines
    assert (prefill.tokens, prefill.acceptance_length, prefill.tokens_per_second) == (1, None, None)
    assert (first.tokens, first.acceptance_length, first.tokens_per_second) == (4, 3.0, 3 / 0.5)
    assert (second.tokens, second.acceptance_length, second.tokens_per_second) == (5, 2.0, 4 / 1.0)
    assert [piece.text for piece in first.drafted] == ["b", "c", "d"]
    assert first.bonus and first.bonus.text == "d"
    assert [line.beyond for line in lines] == [0, 0, 0]


@pytest.mark.parametrize(
    ("limit", "drafted", "beyond", "tokens"),
    [(100, "abc", 0, 5), (5, "abc", 0, 5), (3, "abc", 2, 3), (1, "abc", 4, 1)],
)
def test_tokens_beyond_the_limit_are_counted_as_such(limit: int, drafted: str, beyond: int, tokens: int) -> None:
    _, line = tell([VerifyPass(4, [], 0, 65), VerifyPass(5, ids(drafted), 3, 66)], limit)
    assert (line.beyond, line.tokens, line.acceptance_length) == (beyond, tokens, 4.0)


def test_what_follows_the_end_of_sequence_is_beyond() -> None:
    _, line = tell([VerifyPass(4, [], 0, 65), VerifyPass(5, [66, END, 67], 3, 68)])
    assert (line.beyond, line.tokens) == (2, 3)


def test_passes_of_an_engine_that_tells_only_counts() -> None:
    _, line = tell([VerifyPass(4, [], 0, 65), VerifyPass(-1, [], 2, -1)])
    assert (line.bonus, line.drafted, line.accepted, line.acceptance_length, line.beyond) == (None, [], 2, 3.0, 0)


def test_every_token_of_the_vocabulary_has_a_piece() -> None:
    pieces = Pieces(TOKENIZER, ())
    assert all(pieces.add(token).id == token for token in range(VOCAB))
