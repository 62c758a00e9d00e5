"""What is said to each kind of server, and how answers become conversations."""

import json
from pathlib import Path
from typing import Any

import pytest

from ray_eagle.config import GenerateConfig
from ray_eagle.conversations.backends.dialects import (
    OpenAI,
    RayEagle,
    Sampling,
    SGLang,
    TextAnswer,
    TextQuestion,
    TokenAnswer,
    TokenQuestion,
)
from ray_eagle.conversations.backends.fleet import Fault, reason_of
from ray_eagle.conversations.chat import TextChat, TokenChat, answer_of
from ray_eagle.conversations.mask import Renderer
from ray_eagle.conversations.messages import RowError
from ray_eagle.conversations.prompts import Prompt
from ray_eagle.conversations.remote import api_key
from ray_eagle.conversations.template import begins_to_reason, render_prompt
from ray_eagle.errors import ConfigError, ServingError
from ray_eagle.serving.messages import GenerateRequest
from tests.chat_templates import STYLES, stops_of, tokenizer_of
from tests.tiny import tiny_tokenizer

SAMPLING = Sampling(64, 0.0, 1.0)
MARKS = ("<think>\n", "\n</think>\n\n")
EXPLICIT = {"temperature": 0.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0} | {
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
}


def choice(message: dict[str, Any], finish: Any = "stop", **more: Any) -> dict[str, Any]:
    return {"choices": [{"message": {"role": "assistant", **message}, "finish_reason": finish}], **more}


# --- bodies ---------------------------------------------------------------------------------------------------------


def test_sampling_is_named_whole() -> None:
    messages = [{"role": "user", "content": "a"}]
    body = OpenAI(SAMPLING, None, 100).body(TextQuestion(messages, 7), "m")
    assert body.items() >= EXPLICIT.items()
    assert body["messages"] == messages and (body["model"], body["max_tokens"], "seed" in body) == ("m", 64, False)
    body = SGLang(SAMPLING, [2, 5], 100).body(TokenQuestion([1, 2], 7), "m")
    assert body["sampling_params"].items() >= EXPLICIT.items() and body["input_ids"] == [1, 2]
    assert body["sampling_params"]["max_new_tokens"] == 64 and body["sampling_params"]["stop_token_ids"] == [2, 5]
    sampled = Sampling(64, 0.7, 0.9)
    assert OpenAI(sampled, None, 9).body(TextQuestion([], 7), "m").items() >= {"seed": 7, "top_p": 0.9}.items()
    assert SGLang(sampled, [], 9).body(TokenQuestion([], 7), "m")["sampling_params"]["sampling_seed"] == 7
    body = RayEagle(SAMPLING, {}, 100).body(TokenQuestion([1, 2], 7), "m")
    assert GenerateRequest.model_validate(body).input_ids == [1, 2]


# --- answers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_reasoning_is_found_under_both_names(name: str) -> None:
    usage = {"prompt_tokens": 11, "completion_tokens": 5}
    found = OpenAI(SAMPLING, None, 100).answer(choice({"content": "b", name: "why"}, "length", usage=usage))
    assert (found.content, found.reasoning, found.reasoning_name, found.finish) == ("b", "why", name, "length")
    assert (found.prompt_tokens, found.tokens) == (11, 5)
    found = OpenAI(SAMPLING, None, 100).answer(choice({"content": None, name: "why"}))
    assert (found.content, found.reasoning, found.prompt_tokens) == ("", "why", None)


@pytest.mark.parametrize(
    ("payload", "kind", "text"),
    [
        ([], Fault, "expected choices.0 in the answer"),
        ({"choices": []}, Fault, "expected choices.0"),
        ({"choices": [{"finish_reason": "stop"}]}, Fault, "expected message in the answer"),
        (choice({"content": 3}), Fault, "expected texts"),
        (choice({"content": "a"}, None), Fault, "broke off"),
        (choice({"content": "a"}, "abort"), Fault, "broke off"),
        (choice({"content": "a"}, "content_filter"), RowError, "ended the answer with 'content_filter'"),
        (choice({"content": "a", "tool_calls": [{}]}), RowError, "for a tool call"),
    ],
)
def test_what_is_no_answer_in_text(payload: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        OpenAI(SAMPLING, None, 100).answer(payload)


def sglang(ids: Any, finish: Any, made: int | None = None) -> dict[str, Any]:
    return {
        "output_ids": ids,
        "meta_info": {"finish_reason": finish, "completion_tokens": len(ids) if made is None else made},
    }


def test_ids_come_as_they_are() -> None:
    dialect = SGLang(SAMPLING, [2], 100)
    assert dialect.answer(sglang([5, 99, 2], {"type": "stop", "matched": 2})) == TokenAnswer([5, 99, 2], "stop")
    reply = {"tokens": [5, 2], "finish_reason": "length"}
    assert RayEagle(SAMPLING, {}, 100).answer(reply) == TokenAnswer([5, 2], "length")


@pytest.mark.parametrize(
    ("payload", "kind", "text"),
    [
        ({}, Fault, "expected meta_info.finish_reason"),
        (sglang([1], None), Fault, "finish_reason: expected a dict"),
        (sglang([1], {"type": "abort", "message": "KV full"}), Fault, "broke off .KV full"),
        (sglang([], {"type": "stop"}), Fault, "output_ids: expected token ids"),
        (sglang([1, "2"], {"type": "stop"}), Fault, "output_ids: expected token ids"),
        (sglang([1, True], {"type": "stop"}), Fault, "output_ids: expected token ids"),
        (sglang([1, 2], {"type": "stop"}, made=3), Fault, "expected 3 token ids, found 2"),
        (sglang([1, 100], {"type": "stop"}), ServingError, "token 100, but the target has 100"),
    ],
)
def test_what_is_no_answer_in_ids(payload: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        SGLang(SAMPLING, [2], 100).answer(payload)


def test_the_model_is_the_one_asked_for_or_the_only_one() -> None:
    one, two = {"data": [{"id": "a"}]}, {"data": [{"id": "a"}, {"id": "b"}]}
    assert OpenAI(SAMPLING, None, 100).seen("u", one) == "a" and OpenAI(SAMPLING, "b", 100).seen("u", two) == "b"
    with pytest.raises(ServingError, match=r"server u has a, b\. Set generate\.model to one"):
        OpenAI(SAMPLING, None, 100).seen("u", two)
    with pytest.raises(ServingError, match=r"expected the model 'c', found a, b"):
        OpenAI(SAMPLING, "c", 100).seen("u", two)
    with pytest.raises(Fault):
        OpenAI(SAMPLING, None, 100).seen("u", {"data": []})


def test_a_server_of_this_project_must_hold_the_same_target() -> None:
    mine = {"config": "1", "tokenizer": "2"}
    payload = {"target": "/x", "target_fingerprint": {**mine, "weights": "9"}}
    assert RayEagle(SAMPLING, mine, 9).seen("u", payload) == "/x"
    with pytest.raises(ServingError, match=r"another target \(/x\): its tokenizer differ"):
        RayEagle(SAMPLING, {**mine, "tokenizer": "3"}, 9).seen("u", payload)


def test_reasons_are_found_inside_error_objects() -> None:
    assert reason_of(b'{"error": {"message": "a"}}') == reason_of(b'{"detail": "a"}') == reason_of(b'"a"') == "a"
    assert reason_of(b"<html> oops\n</html>") == "<html> oops </html>" and reason_of(b"") == "nothing"


# --- conversations in text ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "reasoning", "finish", "begun", "wanted"),
    [
        ("b", "", "stop", False, ("b", "")),
        ("b", "r", "stop", True, ("b", "r")),
        ("<think>\nr\n</think>\n\nb", "", "stop", False, ("b", "r")),
        ("r\n</think>\n\nb", "", "stop", True, ("b", "r")),
        ("a </think> b", "", "stop", False, ("a </think> b", "")),
        ("<think>\nhalf", "", "length", False, ("", "half")),
        ("half", "", "length", True, ("", "half")),
        ("", "half", "length", True, ("", "half")),
        ("half", "", "length", False, ("half", "")),
    ],
)
def test_reasoning_is_apart_whoever_took_it_apart(
    content: str, reasoning: str, finish: Any, begun: bool, wanted: tuple[str, str]
) -> None:
    message = answer_of(content, reasoning, finish, MARKS, begun)
    assert (message["content"], message.get("reasoning_content", "")) == wanted


def settings_of(**more: Any) -> GenerateConfig:
    return GenerateConfig(backend="openai", urls=("http://x",), **more)


def rendered_by(style: str) -> Renderer:
    tokenizer = tokenizer_of(style)
    return Renderer(tokenizer, stops_of(style, tokenizer), MARKS)


def chat_of(style: str, answers: list[tuple[str, str, Any]], **more: Any) -> tuple[TextChat, Renderer]:
    """A chat that got (content, reasoning, finish) turn by turn."""
    renderer = rendered_by(style)
    prompt = Prompt("x", "c", tuple(f"question {i}" for i in range(len(answers))), row=3)
    chat = TextChat(prompt, settings_of(**more), begins_to_reason(renderer.tokenizer, MARKS[0]))
    for turn, (content, reasoning, finish) in enumerate(answers):
        asked = chat.ask(turn)
        if asked is None:
            break
        chat.add(turn, asked, TextAnswer(content, reasoning, "reasoning", finish, None, 0))
    return chat, renderer


@pytest.mark.parametrize("style", STYLES)
def test_text_becomes_what_the_target_read_and_wrote(style: str) -> None:
    chat, renderer = chat_of(style, [("Yes, it is.", "Well, hm", "stop")])
    (row,), rejected = chat.made(renderer, frozenset(), 10_000)
    ((start, end),) = row["supervised"]
    asked = render_prompt(renderer.tokenizer, "question 0")
    assert not rejected and row["input_ids"][:start] == asked and end == len(row["input_ids"])
    said = renderer.tokenizer.decode(row["input_ids"][start:end])
    assert said.index("Well, hm") < said.index("Yes, it is.") and row["finish_reasons"] in (["stop"], ["none"])
    assert (row["source_id"], row["row"], row["messages"][1]["reasoning_content"]) == ("x", 3, "Well, hm")
    twin = renderer.samples(row["messages"])[0]  # the path of kept answers
    assert (row["input_ids"], row["supervised"]) == (twin.input_ids, twin.supervised)


@pytest.mark.parametrize("content", ["The answer, end", "n", "the answer is  ", "an end\n", "e"])
@pytest.mark.parametrize("style", STYLES)
def test_a_cut_answer_ends_with_its_text_and_nothing_that_the_template_adds(style: str, content: str) -> None:
    whole, renderer = chat_of(style, [(content, "Well, hm", "stop")])
    cut, _ = chat_of(style, [(content, "Well, hm", "length")])
    ((full,), _), ((row,), _) = whole.made(renderer, frozenset(), 10_000), cut.made(renderer, frozenset(), 10_000)
    ((start, end),) = row["supervised"]
    said = renderer.tokenizer.decode(row["input_ids"][start:end])
    text = renderer.tokenizer.decode(full["input_ids"][start:])
    assert end == len(row["input_ids"]) and text.startswith(said)
    assert said.rstrip().endswith(content.rstrip()) and not any(said.endswith(stop) for stop in STYLES[style].stops)
    assert text[len(said) :].lstrip() in (*STYLES[style].stops, ""), "only the end-of-turn mark is gone"
    assert row["finish_reasons"] == ["length"]


@pytest.mark.parametrize("style", STYLES)
def test_an_answer_cut_in_its_reasoning_ends_with_that(style: str) -> None:
    chat, renderer = chat_of(style, [("", "n th", "length")])
    rows, rejected = chat.made(renderer, frozenset(), 10_000)
    if rejected:  # a template that drops such reasoning is refused, never learnt from
        assert "reasoning" in rejected[0]["reason"]
        return
    ((start, end),) = rows[0]["supervised"]
    said = renderer.tokenizer.decode(rows[0]["input_ids"][start:end])
    assert said.endswith("n th") and "</think>" not in said and rows[0]["finish_reasons"] == ["length"]
    assert rows[0]["input_ids"][:start] == render_prompt(renderer.tokenizer, "question 0")


def test_a_cut_answer_in_the_middle_is_closed_but_its_mark_is_not_learnt() -> None:
    chat, renderer = chat_of("chatml", [("first", "", "length"), ("second", "", "stop")])
    (row,), _ = chat.made(renderer, frozenset(), 10_000)
    spoken = [renderer.tokenizer.decode(row["input_ids"][a:b]) for a, b in row["supervised"]]
    assert spoken == ["first", "second<|im_end|>"] and row["finish_reasons"] == ["length", "stop"]
    assert "first<|im_end|>\n<|im_start|>user" in renderer.tokenizer.decode(row["input_ids"])


def test_what_was_said_goes_back_under_the_servers_own_names() -> None:
    chat, _ = chat_of("qwen3", [("one", "because", "stop"), ("two", "", "stop")])
    assert chat._sent[1] == {"role": "assistant", "content": "one", "reasoning": "because"}
    assert [m["role"] for m in chat._sent] == ["user", "assistant"] * 2


def test_templates_that_change_earlier_turns_are_rejected_or_split() -> None:
    answers = [("one", "because", "stop"), ("two", "of that", "stop")]
    chat, renderer = chat_of("qwen3", answers)
    rows, rejected = chat.made(renderer, frozenset(), 10_000)
    assert not rows and "Set generate.turns to split" in rejected[0]["reason"] and rejected[0]["row"] == 3
    chat, renderer = chat_of("qwen3", answers, turns="split")
    rows, rejected = chat.made(renderer, frozenset(), 10_000)
    assert [row["source_id"] for row in rows] == ["x", "x#turn1"] and {row["row"] for row in rows} == {3}
    spoken = [renderer.tokenizer.decode(row["input_ids"][slice(*row["supervised"][-1])]) for row in rows]
    assert spoken == ["<think>\nof that\n</think>\n\ntwo<|im_end|>", "<think>\nbecause\n</think>\n\none<|im_end|>"]


def test_cut_answers_are_dropped_when_asked_for() -> None:
    chat, renderer = chat_of("chatml", [("half", "", "length"), ("x", "", "stop")], drop_cut=True)
    reason = "the answer was cut at 512 tokens (generate.drop_cut)"
    assert chat.made(renderer, frozenset(), 10_000) == ([], [{"row": 3, "source_id": "x", "reason": reason}])
    chat, renderer = chat_of("chatml", [("one", "", "stop"), ("half", "", "length")], drop_cut=True)
    (row,), rejected = chat.made(renderer, frozenset(), 10_000)
    assert not rejected and len(row["messages"]) == 2 and row["note"] == f"ended before turn 2: {reason}"

    settings = GenerateConfig(drop_cut=True)
    tokens = TokenChat(Prompt("y", "c", ("a",), row=1), settings, tiny_tokenizer(), frozenset([1]), 512)
    asked = tokens.ask(0)
    assert asked
    tokens.add(0, asked, [5, 6], "length")
    assert tokens.made() == ([], [{"row": 1, "source_id": "y", "reason": reason}])


def test_a_turn_that_fails_keeps_the_turns_before() -> None:
    chat, renderer = chat_of("chatml", [("one", "", "stop")])
    chat.end(1, "refused by the server: HTTP 400: too long")
    assert chat.ask(1) is None
    (row,), _ = chat.made(renderer, frozenset(), 10_000)
    assert row["note"] == "ended before turn 2: refused by the server: HTTP 400: too long"
    with pytest.raises(RowError, match="empty"):
        chat_of("chatml", [("", "", "stop")])


# --- ids beside the text ------------------------------------------------------------------------------------------------


def test_ids_beside_the_text_are_found_where_sglang_and_vllm_put_them() -> None:
    dialect = OpenAI(SAMPLING, None, 100)
    assert dialect.body(TextQuestion([], 0), "m")["return_token_ids"] is True
    sglang_reply, vllm_reply = choice({"content": "b"}), choice({"content": "b"}, prompt_token_ids=[1, 2])
    sglang_reply["choices"][0] |= {"prompt_token_ids": [1, 2], "response_token_ids": [3]}
    vllm_reply["choices"][0] |= {"token_ids": [3]}
    for payload in (sglang_reply, vllm_reply):
        found = dialect.answer(payload)
        assert (found.prompt_ids, found.ids) == ([1, 2], [3])
    found = dialect.answer(choice({"content": "b"}, prompt_token_ids=None))
    assert (found.prompt_ids, found.ids) == (None, None)
    vllm_reply["choices"][0]["token_ids"] = [100]
    with pytest.raises(ServingError, match="token 100, but the target has 100"):
        dialect.answer(vllm_reply)


A, B = [1, 2, 3], [1, 2, 3, 50, 9, 4, 5]  # prompts of two turns; 9 ends a turn


def exact_chat(first: list[int], second: list[int], **more: Any) -> tuple[TextChat, Renderer]:
    renderer = rendered_by("chatml")
    chat = TextChat(Prompt("x", "c", ("a", "b"), row=3), settings_of(**more), False)
    for turn, (prompt, ids) in enumerate([(A, first), (B, second)]):
        asked = chat.ask(turn)
        assert asked
        finish: Any = "stop" if ids[-1] == 9 else "length"
        chat.add(turn, asked, TextAnswer("yes", "", "reasoning", finish, None, 0, prompt, ids))
    return chat, renderer


def test_ids_beside_the_text_are_stored_as_they_are() -> None:
    chat, renderer = exact_chat([50, 9], [60, 61])
    (row,), _ = chat.made(renderer, frozenset([9]), 100)
    assert (row["input_ids"], row["supervised"]) == ([*B, 60, 61], [[3, 5], [7, 9]])
    assert (row["mask"], row["finish_reasons"], row["row"]) == ("generated", ["stop", "length"], 3)
    assert [m["role"] for m in row["messages"]] == ["user", "assistant"] * 2
    chat, renderer = exact_chat([50, 9], [60, 61], turns="last")
    (row,), _ = chat.made(renderer, frozenset([9]), 100)
    assert (row["supervised"], row["finish_reasons"], row["mask"]) == ([[7, 9]], ["length"], "generated")


def test_an_answer_that_the_next_prompt_writes_otherwise_has_a_conversation_of_its_own() -> None:
    chat, renderer = exact_chat([25, 25, 9], [60, 9], turns="split")  # 50 stands for 25, 25 when tokenized again
    rows, _ = chat.made(renderer, frozenset([9]), 100)
    assert [(row["source_id"], row["input_ids"], row["supervised"]) for row in rows] == [
        ("x", [*B, 60, 9], [[7, 9]]),
        ("x#turn1", [*A, 25, 25, 9], [[3, 6]]),
    ]
    assert [len(row["messages"]) for row in rows] == [4, 2] and {row["mask"] for row in rows} == {"generated"}


@pytest.mark.parametrize(
    ("first", "second", "more"),
    [
        ([25, 25, 9], [60, 9], {}),  # one conversation cannot hold both
        ([50, 9], [60, 9], {"supervise_reasoning": False}),
        ([50, 9], [60, 9], {"reasoning": "drop"}),
    ],
)
def test_where_ids_do_not_do_the_text_is_taken(first: list[int], second: list[int], more: dict[str, Any]) -> None:
    chat, renderer = exact_chat(first, second, **more)
    (row,), _ = chat.made(renderer, frozenset([9]), 100)
    assert row["mask"] == "rendering" and "yes<|im_end|>" in renderer.tokenizer.decode(row["input_ids"])


def test_a_server_that_leaves_out_the_end_of_turn_token_is_not_taken_at_its_word() -> None:
    chat, renderer = exact_chat([50, 9], [60, 9])
    (row,), _ = chat.made(renderer, frozenset([8]), 100)
    assert row["mask"] == "rendering"


# --- settings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given", ["http://a:1/v1, https://b/", ["http://a:1", "https://b/v1/"], ("http://a:1/", "https://b")]
)
def test_addresses_as_people_write_them(given: Any) -> None:
    assert GenerateConfig(backend="openai", urls=given).urls == ("http://a:1", "https://b")


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"backend": "openai"}, "backend is openai, but urls is empty"),
        ({"urls": ["http://a"]}, "backend is embedded, but urls are given"),
        ({"backend": "sglang", "urls": ["a:1"]}, "'a:1' does not begin with http://"),
        ({"backend": "openai", "urls": ["http://a"], "answers": "keep"}, "kept answers need no server"),
        ({"backend": "ray_eagle", "urls": ["http://a"], "temperature": 1}, "answers greedily"),
    ],
)
def test_contradictions_are_refused(settings: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        GenerateConfig.model_validate(settings)


def test_the_key_is_read_where_it_is_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert api_key(settings_of()) == ""
    named = settings_of(api_key_env="EAGLE_TEST_KEY")
    with pytest.raises(ConfigError, match="environment variable EAGLE_TEST_KEY, which is not set here"):
        api_key(named)
    monkeypatch.setenv("EAGLE_TEST_KEY", "s3cret")
    assert api_key(named) == "s3cret" and "s3cret" not in json.dumps(named.model_dump(mode="json"))
