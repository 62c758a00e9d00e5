"""Decoding in slots against transformers' `generate`, one prompt at a time."""

import random
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from ray_eagle.target.attention import GROUPED, group_queries
from ray_eagle.target.generation import Answer, Decoder, Request
from tests.tiny import VOCAB, tiny_deepseek_v3, tiny_qwen3_moe, tiny_target

LIMIT = 24
EOS = list(range(3, VOCAB, 14))
"""Many, so that answers end at different steps."""


@pytest.fixture(scope="module", params=[tiny_target, tiny_qwen3_moe, tiny_deepseek_v3])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    make: Callable[..., Path] = request.param
    loaded = AutoModelForCausalLM.from_pretrained(make(tmp_path_factory.mktemp("target")), dtype=torch.float32).eval()
    loaded.generation_config = GenerationConfig()
    return loaded


@pytest.fixture(params=["sdpa", "grouped"])
def attention(request: pytest.FixtureRequest, model: Any) -> Iterator[str]:
    """As transformers attends, or as the generator lets it."""
    if request.param == "grouped":
        group_queries(model)
        assert model.config._attn_implementation == GROUPED
    yield request.param
    model.set_attn_implementation("sdpa")


def alone(model: Any, prompt: list[int]) -> Answer:
    """The slow twin."""
    model.set_attn_implementation("sdpa")
    out = model.generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), max_new_tokens=LIMIT, do_sample=False,
        eos_token_id=EOS, pad_token_id=0,
    )  # fmt: skip
    ids = out[0, len(prompt) :].tolist()
    return Answer(ids, "stop" if ids[-1] in EOS else "length")


def random_prompts(seed: int, count: int, longest: int = 40) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB) for _ in range(rng.randint(1, longest))] for _ in range(count)]


@pytest.mark.parametrize("slots", [3, 20])
def test_every_prompt_gets_the_answer_that_it_gets_alone(model: Any, slots: int, attention: str) -> None:
    prompts = random_prompts(slots, 12)
    waiting = deque(Request(prompt, i) for i, prompt in enumerate(prompts))
    found = {
        request.owner: answer
        for request, answer in Decoder(model, eos=EOS, slots=slots, max_new_tokens=LIMIT).run(waiting)
    }
    expected = {i: alone(model, prompt) for i, prompt in enumerate(prompts)}
    assert found == expected
    assert any(a.finish_reason == "stop" for a in expected.values())
    assert len({len(a.ids) for a in expected.values()}) > 1, "rows ended at different steps"


def test_a_request_that_comes_while_others_are_decoded_is_answered_too(model: Any) -> None:
    """As the next turn of a conversation does: its prompt is longer than anything before."""
    prompts = random_prompts(5, 6, longest=8)
    waiting = deque(Request(prompt, (i, 0)) for i, prompt in enumerate(prompts))
    found = {}
    for request, answer in Decoder(model, eos=EOS, slots=4, max_new_tokens=LIMIT).run(waiting):
        found[request.owner] = (request.ids, answer)
        i, turn = request.owner
        if turn < 2:
            waiting.append(Request([*request.ids, *answer.ids, 11, 12, 13], (i, turn + 1)))
    assert len(found) == 18
    for ids, answer in found.values():
        assert answer == alone(model, ids)


def test_long_answers_do_not_keep_columns_that_no_row_uses(tmp_path: Path) -> None:
    """Many short requests one after another: the cache stays as short as the longest of them."""
    loaded = AutoModelForCausalLM.from_pretrained(tiny_target(tmp_path / "target"), dtype=torch.float32).eval()
    widths = []
    loaded.register_forward_pre_hook(
        lambda module, args, kwargs: widths.append(kwargs["attention_mask"].shape[1]), with_kwargs=True
    )
    waiting = deque(Request(prompt) for prompt in random_prompts(1, 60, longest=10))
    assert len(list(Decoder(loaded, eos=[], slots=2, max_new_tokens=LIMIT).run(waiting))) == 60
    assert max(widths) <= 2 * (10 + LIMIT) + LIMIT < 30 * LIMIT


def test_sampled_text_depends_on_its_seed_and_not_on_the_slots(model: Any) -> None:
    prompts = random_prompts(9, 10)

    def texts(slots: int, seed: str, top_p: float = 0.9) -> list[list[int]]:
        waiting = deque(Request(prompt, i, f"{seed} {i}") for i, prompt in enumerate(prompts))
        decoder = Decoder(model, eos=EOS, slots=slots, max_new_tokens=LIMIT, temperature=1.3, top_p=top_p)
        return [answer.ids for _, answer in sorted(decoder.run(waiting), key=lambda pair: pair[0].owner)]

    assert texts(2, "a") == texts(7, "a") != texts(2, "b")
    greedy = [alone(model, prompt).ids for prompt in prompts]
    assert texts(3, "a", top_p=1e-6) == greedy, "a nucleus of one token"


def test_tokens_are_drawn_with_their_probabilities() -> None:
    """Against the softmax, cut off at the nucleus and made to sum to one."""
    logits = torch.tensor([[2.0, 0.5, 1.5, -1.0, 0.0]])
    decoder = Decoder(None, eos=[], slots=1, max_new_tokens=1, temperature=0.7, top_p=0.8)
    p = (logits[0] / 0.7).softmax(-1)
    nucleus, total = [], 0.0
    for index in p.argsort(descending=True).tolist():
        if total < 0.8:
            nucleus.append(index)
        total += float(p[index])
    draw = type("Row", (), {"draw": random.Random(0)})()
    counts = torch.zeros(5)
    for _ in range(4000):
        counts[decoder.choose(logits, [draw])[0]] += 1
    expected = torch.zeros(5)
    expected[nucleus] = p[nucleus] / p[nucleus].sum()
    assert 1 < len(nucleus) < 5
    highest = type("Row", (), {"draw": type("Draw", (), {"random": staticmethod(lambda: 1 - 2**-53)})()})()
    assert decoder.choose(logits, [highest]) == [nucleus[-1]]
    torch.testing.assert_close(counts / counts.sum(), expected, atol=0.03, rtol=0)
