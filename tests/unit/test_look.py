"""Looking at conversations: what the data holds does not reach the terminal as commands."""

from ray_eagle.conversations.conversation import Conversation
from ray_eagle.conversations.look import pieces
from tests.chat_templates import CHATML, IM, make_tokenizer


def test_control_characters_of_the_data_are_spelled_out() -> None:
    tokenizer = make_tokenizer(CHATML, IM, "<|im_end|>")
    text = "a\x1b[2J\x07\r\x9b31m\x7f\tb\n🦅 \u200dé"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    conversation = Conversation(
        source_id="x",
        category="none",
        split="train",
        messages=[],
        input_ids=ids,
        supervised=[[1, len(ids)]],
        finish_reasons=["stop"],
        mask="rendering",
        row=1,
    )
    shown = "".join(piece.text for piece in pieces(conversation, tokenizer))
    assert shown == "a\\x1b[2J\\x07\\x0d\\x9b31m\\x7f\tb\n🦅 \u200dé"
