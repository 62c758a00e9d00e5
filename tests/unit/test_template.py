"""From messages to ids: what the template says, token for token, and the target's own ids kept as it wrote them."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from ray_eagle.config import GenerateConfig, TargetConfig
from ray_eagle.conversations.batches import Batch
from ray_eagle.conversations.generate import Generator, check_template_system
from ray_eagle.conversations.prompts import Prompt
from ray_eagle.conversations.template import injected_system, render_next_turn, render_prompt, stop_ids
from ray_eagle.errors import InputError
from ray_eagle.progress import Silent
from ray_eagle.target.loading import read_facts
from tests.chat_templates import STYLES, tokenizer_of
from tests.tiny import CHAT_TEMPLATE, SPECIALS, tiny_tokenizer

TEXTS = ["Hi", "What is 2 + 2?\n\nThink.", " blanks  around ", "Grüße, 世界 🦅", "{{ x }} {% raw %}", "a\r\n\tb"]


def rendered(tokenizer: Any, messages: list[dict[str, str]], generate: bool = False) -> str:
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=generate)


def chat(*texts: str) -> list[dict[str, str]]:
    return [{"role": "assistant" if i % 2 else "user", "content": text} for i, text in enumerate(texts)]


def merging_tokenizer(letters: str = "abcdefgh") -> PreTrainedTokenizerFast:
    """Bytes, and a merge of every pair of letters: text has one canonical split, and ids many."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [(a, b) for a in letters for b in letters]
    vocab = {token: i for i, token in enumerate([*alphabet, *(a + b for a, b in merges)])}
    core = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<|pad|>", eos_token="<|end|>")
    fast.add_special_tokens({"additional_special_tokens": SPECIALS[2:]})
    fast.chat_template = CHAT_TEMPLATE
    return fast


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("make", [tiny_tokenizer, merging_tokenizer])
def test_first_prompt_is_the_templates_own_tokenisation(make: Any, text: str) -> None:
    tokenizer = make()
    own = tokenizer.apply_chat_template(chat(text), add_generation_prompt=True, return_dict=True)["input_ids"]
    assert render_prompt(tokenizer, text) == own
    assert tokenizer.decode(own) == f"<|user|>{text}<|end|>\n<|assistant|>"


def test_no_beginning_of_sequence_is_added_to_what_the_template_wrote() -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|system|> $A", special_tokens=[("<|system|>", tokenizer.convert_tokens_to_ids("<|system|>"))]
    )
    assert tokenizer("a")["input_ids"][0] == tokenizer.convert_tokens_to_ids("<|system|>")
    messages = chat("a", "b")
    ids = render_prompt(tokenizer, "a")
    ids += render_next_turn(tokenizer, messages, "c", end_of_turn="<|end|>")
    assert tokenizer.convert_tokens_to_ids("<|system|>") not in ids


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("ended", [True, False])
def test_exact_ids_of_two_turns_decode_to_the_template_of_the_whole(ended: bool, seed: int) -> None:
    tokenizer = tiny_tokenizer()
    rng = random.Random(seed)
    first, second = rng.choice(TEXTS), rng.choice(TEXTS)
    answer = "".join(rng.choices("abc .\né世", k=rng.randint(0, 12)))
    answer_ids = tokenizer(answer, add_special_tokens=False)["input_ids"]
    ids = render_prompt(tokenizer, first) + answer_ids + [tokenizer.eos_token_id] * ended
    messages = chat(first, answer)
    more = render_next_turn(tokenizer, messages, second, end_of_turn=tokenizer.eos_token if ended else "")
    assert tokenizer.decode(ids + more) == rendered(tokenizer, [*messages, *chat(second)], generate=True)
    assert (ids + more).count(tokenizer.eos_token_id) == 3  # of user, assistant, user


def test_three_turns_follow_one_another() -> None:
    tokenizer = tiny_tokenizer()
    ids = render_prompt(tokenizer, "one")
    messages: list[dict[str, str]] = []
    ended = True
    for user, answer, ends in [("one", "1", True), ("two", "22", False), ("three", "", True)]:
        if messages:
            ids += render_next_turn(tokenizer, messages, user, end_of_turn=tokenizer.eos_token if ended else "")
        ended = ends
        ids += tokenizer(answer)["input_ids"] + [tokenizer.eos_token_id] * ended
        messages += chat(user, answer)
    assert tokenizer.decode(ids) + "\n" == rendered(tokenizer, messages)


# --- templates that cannot be continued -----------------------------------------------------------------------------

GENERATION = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
UNSTABLE = {
    "drops what earlier answers said": (
        "{% for m in messages %}<|{{ m['role'] }}|>{% if m['role'] == 'user' or loop.last %}{{ m['content'] }}{% endif %}"
        "<|end|>\n{% endfor %}" + GENERATION
    ),
    "drops the thinking of earlier answers": (
        "{% for m in messages %}<|{{ m['role'] }}|>"
        "{{ m['content'] if loop.last else m['content'].split('</think>')[-1] }}<|end|>\n{% endfor %}" + GENERATION
    ),
    "numbers the turns that remain": (
        "{{ messages | length }}{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>\n{% endfor %}"
        + GENERATION
    ),
    "strips answers": (
        "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] | trim }}<|end|>\n{% endfor %}" + GENERATION
    ),
}


@pytest.mark.parametrize("template", UNSTABLE.values(), ids=UNSTABLE.keys())
def test_a_template_that_changes_an_earlier_turn_is_refused_naming_the_turn(template: str) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(InputError, match=r"chat template: turn 1 renders otherwise once another turn follows"):
        render_next_turn(tokenizer, chat("a", "<think>b</think> c "), "d", end_of_turn="<|end|>")
    with pytest.raises(InputError, match="chat template: turn 2 renders otherwise"):
        render_next_turn(tokenizer, chat("a", "b", "c", "<think>d</think> e "), "f", end_of_turn="<|end|>")


def test_a_template_that_changes_only_the_first_of_three_turns_is_refused() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}<|{{ m['role'] }}|>"
        "{{ m['content'] if messages | length - loop.index < 4 else '...' }}<|end|>\n{% endfor %}" + GENERATION
    )
    messages = chat("a", "b")
    assert render_next_turn(tokenizer, messages, "c", end_of_turn="<|end|>")
    with pytest.raises(InputError, match="turn 2 renders otherwise"):
        render_next_turn(tokenizer, [*messages, *chat("c", "d")], "e", end_of_turn="<|end|>")


def test_an_end_of_turn_that_the_template_does_not_write_is_refused() -> None:
    tokenizer = tiny_tokenizer()
    with pytest.raises(InputError, match=r"expected '<\|pad\|>' after an answer, found '<\|end\|>"):
        render_next_turn(tokenizer, chat("a", "b"), "c", end_of_turn="<|pad|>")


# --- the target's own ids -------------------------------------------------------------------------------------------


def merging_target(folder: Path) -> Path:
    """A Llama that says letters alone, one by one, where its tokenizer would merge them."""
    torch.manual_seed(0)
    tokenizer = merging_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=7,
        num_attention_heads=2,
        initializer_range=0.3,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).float()
    keep = torch.zeros(len(tokenizer), dtype=torch.bool)
    keep[tokenizer.convert_tokens_to_ids(list("abcdefgh"))] = True
    with torch.no_grad():
        model.lm_head.weight[~keep] = 0  # their logits are 0; the best of 8 random ones is above, nearly always
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_stored_ids_are_the_ones_the_target_wrote_and_not_those_of_its_text(tmp_path: Path) -> None:
    target = TargetConfig(path=str(merging_target(tmp_path / "target")), dtype="float32")
    settings = GenerateConfig(max_new_tokens=10)
    generator = Generator(target, read_facts(target), settings, seed=0)
    prompts = (Prompt("x", "c", ("Hello", "and then?")), Prompt("y", "c", ("ab",)))
    rows, rejected = generator.work(Batch(0, prompts))
    assert not rejected
    assert [row["source_id"] for row in rows] == ["x", "y"]
    tokenizer, model = generator.tokenizer, generator.model
    for row, prompt in zip(rows, prompts, strict=True):
        ids = row["input_ids"]
        assert len(row["supervised"]) == len(row["finish_reasons"]) == len(prompt.turns)
        for turn, (start, end) in enumerate(row["supervised"]):
            slow = ids[:start]  # greedy, one whole forward pass a token
            while len(slow) < end:
                slow.append(int(model(torch.tensor([slow])).logits[0, -1].argmax()))
            assert ids[start:end] == slow[start:]
            text = tokenizer.decode(ids[start:end])
            assert row["messages"][2 * turn + 1]["content"] == text
            assert tokenizer(text)["input_ids"] != ids[start:end]  # re-tokenised, they would be others
            assert row["finish_reasons"][turn] == "length"
        assert [m["content"] for m in row["messages"][::2]] == list(prompt.turns)
        assert tokenizer.decode(ids) + "<|end|>\n" == rendered(tokenizer, row["messages"])


def test_a_rows_system_message_and_the_last_turn_alone(tmp_path: Path) -> None:
    target = TargetConfig(path=str(merging_target(tmp_path / "target")), dtype="float32")
    prompt = Prompt("x", "c", ("Hello", "and then?"), system="Be brief.")
    rows = [
        Generator(target, read_facts(target), GenerateConfig(max_new_tokens=4, turns=turns), 0).work(
            Batch(0, (prompt,))
        )[0][0]
        for turns in ("all", "last")
    ]
    tokenizer = merging_tokenizer()
    text = tokenizer.decode(rows[0]["input_ids"])
    assert text.startswith("<|system|>Be brief.<|end|>\n<|user|>Hello<|end|>\n<|assistant|>")
    assert text + "<|end|>\n" == rendered(tokenizer, rows[0]["messages"])
    assert [m["role"] for m in rows[0]["messages"]] == ["system", *["user", "assistant"] * 2]
    assert rows[1] == {**rows[0], "supervised": rows[0]["supervised"][1:], "finish_reasons": ["length"]}


class Listening(Silent):
    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, message: str) -> None:
        self.said.append(message)


def test_what_a_template_writes_unasked_is_told() -> None:
    tokenizer = tiny_tokenizer()
    heard = Listening()
    assert check_template_system(tokenizer, GenerateConfig(), heard) == "" and not heard.said
    tokenizer.chat_template = "<|system|>Today is {{ strftime_now('%Y') }}.<|end|>\n" + CHAT_TEMPLATE
    assert check_template_system(tokenizer, GenerateConfig(), heard).startswith("Today is 2")
    assert "a system text of its own ('Today is 2" in heard.said[0] and "the date of the day" in heard.said[1]
    with pytest.raises(InputError, match=r"expected no system text that nobody asked for, found 'Today is 2"):
        check_template_system(tokenizer, GenerateConfig(template_system="refuse"), heard)


def test_end_of_turn_ids_are_those_of_all_files(tmp_path: Path) -> None:
    tokenizer = tokenizer_of("glm")
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 5}))
    assert stop_ids(tmp_path, tokenizer) == sorted([5, tokenizer.eos_token_id])
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8, tokenizer.eos_token_id]}))
    assert stop_ids(tmp_path, tokenizer) == sorted([5, 7, 8, tokenizer.eos_token_id])


@pytest.mark.parametrize("style", STYLES)
def test_a_system_text_that_the_template_adds_is_found(style: str) -> None:
    expected = {"injecting": "system\nYou are a helpful assistant.", "harmony": "system\nYou are ChatGPT."}
    assert injected_system(tokenizer_of(style)) == expected.get(style, "")
