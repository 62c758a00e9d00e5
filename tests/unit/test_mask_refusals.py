"""Conversations that have no true mask are refused, saying which turn and why."""

import pytest

from ray_eagle.conversations.mask import Renderer
from ray_eagle.conversations.messages import RowError
from tests.chat_templates import CHATML, IM, MISTRAL, STYLES, make_tokenizer
from tests.unit.test_mask import CALL, MARKS, PLAIN, TALK, WROTE, renderer_of, spoken, with_blocks


def test_an_answer_that_holds_an_end_of_turn_mark_is_refused() -> None:
    renderer = renderer_of("chatml")
    talk = [
        *PLAIN[:2],
        {"role": "assistant", "content": "a"},
        PLAIN[1],
        {"role": "assistant", "content": "b<|im_end|>c"},
    ]
    with pytest.raises(RowError, match=r"turn 2: the answer holds the end-of-turn mark '<\|im_end\|>'"):
        renderer.samples(talk)


def test_what_a_template_raises_is_the_reason() -> None:
    tokenizer = make_tokenizer(MISTRAL, STYLES["mistral"].specials, "</s>")
    talk = [{"role": "developer", "content": "x"}, *PLAIN[1:3]]
    with pytest.raises(RowError, match=r"turn 1: the chat template refuses it \(TemplateError: no such role\)"):
        Renderer(tokenizer, [tokenizer.eos_token_id], MARKS).samples(talk)


def test_a_tool_call_that_a_template_writes_only_without_content_is_written() -> None:
    template = CHATML.replace(
        "{% for c in m.tool_calls or [] %}", "{% for c in (m.tool_calls or []) if not m.content is defined %}"
    )
    template = template.replace("{{ m.content }}", "{{ m.content or '' }}")
    tokenizer = make_tokenizer(template, IM, "<|im_end|>")
    renderer = Renderer(tokenizer, [tokenizer.eos_token_id], MARKS)
    (sample,) = renderer.samples(TALK, reasoning="drop")
    assert spoken(renderer, sample)[0] == f"<tool_call>{WROTE}</tool_call><|im_end|>"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{{ m.content }}", "turn 1: the chat template knows no tool calls and drops this one. Leave the row out$"),
        (
            "{{ m.content }}{% if tools %}{{ m.tool_calls }}{% endif %}",
            "turn 1: the chat template drops its tool call. Give the row its tools where it has none, or leave it out$",
        ),
        ("{{ m.content | upper }}", "turn 1: the chat template drops or changes the answer's text"),
    ],
)
def test_what_a_template_leaves_out_is_refused(content: str, reason: str) -> None:
    tokenizer = make_tokenizer(
        with_blocks("{% generation %}" + content + "{% endgeneration %}<|im_end|>\n"), IM, "<|im_end|>"
    )
    plain = make_tokenizer(with_blocks(content + "<|im_end|>\n"), IM, "<|im_end|>")
    calls = [CALL] if "tool" in reason else []
    talk = [TALK[1], {"role": "assistant", "content": "it is", **({"tool_calls": calls} if calls else {})}]
    for made in (tokenizer, plain):
        with pytest.raises(RowError, match=reason):
            Renderer(made, [made.eos_token_id], MARKS).samples(talk)


def test_a_generation_prompt_that_answers_do_not_have_is_refused() -> None:
    template = CHATML.replace("assistant\n{% endif %}", "assistant\n<think></think>{% endif %}")
    tokenizer = make_tokenizer(template, IM, "<|im_end|>")
    with pytest.raises(RowError, match=r"turn 1: .* otherwise than after its generation prompt"):
        Renderer(tokenizer, [tokenizer.eos_token_id], MARKS).samples(PLAIN[:3], reasoning="drop")
