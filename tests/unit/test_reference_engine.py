"""The reference engine: its text is the target's own, and its drafts are what the formulas of EAGLE-3 say."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaForCausalLM

from ray_eagle.drafter.model import Drafter
from ray_eagle.errors import ConfigError, InputError
from ray_eagle.probing.walk import walk_answer
from ray_eagle.serving.engine import Speculation, Work
from ray_eagle.serving.generation import complete_passes
from ray_eagle.serving.reference import ReferenceEngine, random_drafter
from tests.tiny import VOCAB, tiny_drafter, tiny_shape, tiny_target

Fitted = tuple[Drafter, list[list[int]]]
"""A drafter, and the prompts whose answers it was fitted to."""


def load(folder: Path) -> Any:
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def prompts(count: int, seed: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 256, size=int(rng.integers(1, 24))).tolist() for _ in range(count)]


def greedy(model: Any, prompt: list[int], max_new_tokens: int) -> list[int]:
    """transformers' own greedy decoding, without a cache of ours or theirs."""
    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens, do_sample=False)
    return out[0, len(prompt) :].tolist()


def states(model: Any, tokens: list[int], layers: Sequence[int]) -> Tensor:
    """[T, 3H] of one forward without cache or hooks: hidden_states[L + 1] is the output of layer L."""
    with torch.no_grad():
        hidden = model(input_ids=torch.tensor([tokens]), output_hidden_states=True, use_cache=False).hidden_states
    return torch.cat([hidden[layer + 1][0] for layer in layers], dim=-1)


def fitted_drafter(model: Any, texts: list[list[int]], *, draft_vocab: int = VOCAB, epochs: int = 60) -> Drafter:
    """A drafter that often guesses these texts right and often not: step 0 alone is trained, by a naive loop."""
    shape = tiny_shape(draft_vocab=draft_vocab)
    drafter = random_drafter(shape, seed=5)
    optimizer = torch.optim.Adam(drafter.parameters(), lr=3e-3)
    inputs = [states(model, text, shape.aux_layers) for text in texts]
    for _ in range(epochs):
        for text, aux_TC in zip(texts, inputs, strict=True):
            hidden_TH = drafter.project(aux_TC[:-2])
            input_T2 = drafter.attention_input(
                hidden_TH, model.get_input_embeddings()(torch.tensor(text[1:-1])).detach()
            )
            positions_T = torch.arange(len(text) - 2)
            q, (k, v) = drafter.queries(input_T2, positions_T), drafter.keys_values(input_T2, positions_T)
            q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)
            logits_TD = drafter.logits(drafter.finish(hidden_TH, attended))
            wanted_T = torch.tensor(text[2:])
            loss = F.cross_entropy(logits_TD, torch.where(wanted_T < draft_vocab, wanted_T, -100))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return drafter.eval()


class Slow:
    """The drafter's formulas in float64, one position and one head at a time, nothing cached."""

    def __init__(self, drafter: Drafter, embedding: Tensor) -> None:
        self.shape = drafter.shape
        self.w = {name: tensor.detach().double() for name, tensor in drafter.state_dict().items()}
        self.embedding = embedding.detach().double()
        self.ids = [i + int(offset) for i, offset in enumerate(drafter.d2t)]

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean() + self.shape.rms_norm_eps).sqrt() * self.w[name]

    def head(self, x: Tensor, matrix: str, index: int, position: int | None) -> Tensor:
        e = self.shape.head_dim
        y = self.w[f"midlayer.self_attn.{matrix}.weight"][index * e : (index + 1) * e] @ x
        if position is None:
            return y
        theta = float(self.shape.rope_parameters["rope_theta"])
        turned = y.clone()
        for i in range(e // 2):
            angle = torch.tensor(position * theta ** (-2 * i / e), dtype=torch.float64)
            pair = torch.complex(y[i], y[i + e // 2]) * torch.polar(torch.tensor(1.0).double(), angle)
            turned[i], turned[i + e // 2] = pair.real, pair.imag
        return turned

    def layer(self, g: Tensor, seen: list[tuple[Tensor, int]], x: Tensor, position: int) -> Tensor:
        """u of one position, from the attention inputs and positions of all that it sees, itself included."""
        out = []
        for a in range(self.shape.num_attention_heads):
            group = a * self.shape.num_key_value_heads // self.shape.num_attention_heads
            q = self.head(x, "q_proj", a, position)
            scores = torch.stack([q @ self.head(other, "k_proj", group, at) for other, at in seen])
            weights = torch.softmax(scores / self.shape.head_dim**0.5, 0)
            out.append(
                sum(w * self.head(other, "v_proj", group, None) for w, (other, _) in zip(weights, seen, strict=True))
            )
        y = g + self.w["midlayer.self_attn.o_proj.weight"] @ torch.cat(out)
        z = self.norm(y, "midlayer.post_attention_layernorm.weight")
        gate, up = self.w["midlayer.mlp.gate_proj.weight"] @ z, self.w["midlayer.mlp.up_proj.weight"] @ z
        return y + self.w["midlayer.mlp.down_proj.weight"] @ (gate / (1 + torch.exp(-gate)) * up)

    def attention_input(self, token: int, hidden: Tensor) -> Tensor:
        embedded = self.norm(self.embedding[token], "midlayer.input_layernorm.weight")
        return torch.cat([embedded, self.norm(hidden, "midlayer.hidden_norm.weight")])

    def chain(self, aux_TC: Tensor, tokens: list[int], t: int, steps: int) -> tuple[list[int], list[Tensor]]:
        """Draft `steps` tokens at position t, given tokens 0..t+1 and the target's states of 0..t."""
        fused = [self.w["fc.weight"] @ aux_TC[j].double() for j in range(t + 1)]
        seen = [(self.attention_input(tokens[j + 1], fused[j]), j) for j in range(t + 1)]
        hidden, drafted, logits = fused[t], [], []
        for k in range(steps):
            if k:
                seen.append((self.attention_input(drafted[-1], hidden), t + k))
            hidden = self.layer(hidden, seen, seen[-1][0], t + k)
            logits.append(self.w["lm_head.weight"] @ self.norm(hidden, "norm.weight"))
            drafted.append(self.ids[int(logits[-1].argmax())])
        return drafted, logits


class Recording(Drafter):
    """A drafter that remembers the logits it gave."""

    given: list[Tensor]

    def logits(self, output_TH: Tensor) -> Tensor:
        out = super().logits(output_TH)
        self.given.append(out)
        return out


class Oracle:
    """Knows the whole sequence, and checks that it is told of every position once, in order."""

    aux_layers = (1, 3, 4)

    def __init__(self, sequence: list[int]) -> None:
        self.sequence = sequence
        self.known = 0

    def reset(self) -> None:
        self.known = 0

    def extend(self, aux_TC: Tensor, next_tokens: Sequence[int]) -> None:
        assert aux_TC.shape == (len(next_tokens), 3 * 32)
        assert list(next_tokens) == self.sequence[self.known + 1 : self.known + 1 + len(next_tokens)]
        self.known += len(next_tokens)

    def draft(self, steps: int) -> list[int]:
        drafted = self.sequence[self.known + 1 : self.known + 1 + steps]
        return drafted + [0] * (steps - len(drafted))


@pytest.fixture(scope="module")
def model(target_folder: Path) -> Any:
    return load(target_folder)


@pytest.fixture(scope="module")
def fitted(model: Any) -> Fitted:
    chosen = prompts(8, seed=11)
    texts = [prompt + greedy(model, prompt, 48) for prompt in chosen]
    return fitted_drafter(model, [text for text in texts if len(text) > 4]), chosen


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("steps", [1, 2, 3, 4, 5])
def test_speculative_text_is_the_targets_own(tmp_path: Path, seed: int, steps: int) -> None:
    model = load(tiny_target(tmp_path / "t", seed=seed, layers=7 + seed, scale=(0.1, 0.2, 0.4)[seed], tie=seed == 1))
    eos = model.generation_config.eos_token_id
    engine = ReferenceEngine(model, [eos], tiny_drafter(tiny_shape(aux_layers=(1, 2, 5)), seed=seed))
    for prompt in prompts(4, seed):
        expected = greedy(model, prompt, 30)
        assert engine.plain(prompt, 30).tokens == expected
        assert engine.speculate(prompt, 30, steps).tokens == expected


def test_text_is_the_targets_own_when_drafts_are_partly_right(model: Any, fitted: Fitted) -> None:
    drafter, chosen = fitted
    engine = ReferenceEngine(model, [model.generation_config.eos_token_id], drafter)
    histogram = np.zeros(5, dtype=int)
    for prompt in chosen:
        generation = engine.speculate(prompt, 48, 4)
        assert generation.tokens == greedy(model, prompt, 48)
        for verify in generation.passes:
            histogram[verify.accepted] += 1
    assert histogram.sum() > 50
    assert histogram[1:4].sum() > 0.2 * histogram.sum(), f"partial acceptance was not exercised: {histogram}"


def test_drafts_equal_a_recomputation_without_caches(model: Any, fitted: Fitted) -> None:
    """Every pass: same drafted tokens and same logits as explicit loops over positions, from the target's states."""
    drafter, chosen = fitted
    steps = 3
    recording = Recording(drafter.shape)
    recording.load_state_dict(drafter.state_dict())
    engine = ReferenceEngine(model, [model.generation_config.eos_token_id], recording)
    slow = Slow(drafter, model.get_input_embeddings().weight)
    accepted = []
    for prompt in chosen[:3]:
        recording.given = []
        generation = engine.speculate(prompt, 20, steps)
        text = prompt + generation.tokens
        aux_TC = states(model, text, drafter.shape.aux_layers)
        for number, verify in enumerate(generation.passes):
            drafted, logits = slow.chain(aux_TC, text, verify.start, steps)
            assert verify.drafted == drafted
            for k in range(steps):
                torch.testing.assert_close(
                    recording.given[number * steps + k].double(), logits[k], rtol=1e-3, atol=1e-3
                )
        accepted += [verify.accepted for verify in complete_passes(generation, len(prompt), steps)]
    assert len(set(accepted)) > 1


def test_the_walk_over_states_predicts_every_pass(model: Any, fitted: Fitted) -> None:
    """Judge the drafter at all positions of the answer, walk, and meet the engine pass by pass."""
    drafter, chosen = fitted
    slow = Slow(drafter, model.get_input_embeddings().weight)
    steps, passes = 3, 0
    for prompt in chosen[3:6]:
        generation = ReferenceEngine(model, [], drafter).speculate(prompt, 18, steps)
        text = prompt + generation.tokens
        first, last = len(prompt), len(text) - 1
        aux_TC = states(model, text, drafter.shape.aux_layers)
        right_KT = np.zeros((steps, len(text)), dtype=bool)
        for t in range(first - 1, last - steps):
            drafted, _ = slow.chain(aux_TC, text, t, steps)
            right_KT[:, t] = [drafted[k] == text[t + 2 + k] for k in range(steps)]
        expected = [(verify.start, verify.accepted) for verify in complete_passes(generation, first, steps)]
        assert walk_answer(right_KT, first, last) == expected
        passes += len(expected)
    assert passes >= 12


def test_a_draft_vocabulary_is_mapped_to_target_ids(model: Any) -> None:
    drafter = tiny_drafter(tiny_shape(draft_vocab=40), seed=3)
    engine = ReferenceEngine(model, [], drafter)
    generation = engine.speculate([5, 6, 7], 25, 3)
    slow = Slow(drafter, model.get_input_embeddings().weight)
    text = [5, 6, 7, *generation.tokens]
    aux_TC = states(model, text, drafter.shape.aux_layers)
    for verify in generation.passes[:6]:
        assert verify.drafted == slow.chain(aux_TC, text, verify.start, 3)[0]
        assert all(bool(drafter.t2d[token]) for token in verify.drafted)


def test_passes_tile_the_answer(model: Any, fitted: Fitted) -> None:
    """The first pass starts at a-1, each next one at start + accepted + 1; kept drafts and bonus spell the text."""
    drafter, chosen = fitted
    engine = ReferenceEngine(model, [], drafter)
    for prompt in chosen:
        generation = engine.speculate(prompt, 33, 3)
        start, spelled = len(prompt) - 1, generation.tokens[:1]
        for verify in generation.passes:
            assert verify.start == start
            start += verify.accepted + 1
            spelled += [*verify.drafted[: verify.accepted], verify.bonus]
        assert spelled[:33] == generation.tokens
        assert generation.finish_reason == "length"
        assert generation.decode_tokens == 32


@pytest.mark.parametrize("steps", [1, 3, 5])
def test_an_oracle_is_accepted_in_full(model: Any, steps: int) -> None:
    for prompt in prompts(5, seed=steps):
        engine = ReferenceEngine(model, [])
        sequence = prompt + engine.plain(prompt, 40).tokens
        engine.set_drafter(Oracle(sequence))
        generation = engine.speculate(prompt, 34, steps)
        complete = complete_passes(generation, len(prompt), steps)
        assert generation.tokens == sequence[len(prompt) : len(prompt) + 34]
        assert len(complete) == 1 + (33 - steps) // (steps + 1)
        assert [verify.accepted for verify in complete] == [steps] * len(complete)


def test_a_random_drafter_is_accepted_next_to_never(model: Any) -> None:
    engine = ReferenceEngine(model, [], random_drafter(tiny_shape(draft_vocab=VOCAB), seed=0))
    passes = [
        p for prompt in prompts(12, seed=4) for p in complete_passes(engine.speculate(prompt, 40, 3), len(prompt), 3)
    ]
    assert len(passes) > 300
    assert 1 + sum(p.accepted for p in passes) / len(passes) < 1.1


def test_generation_stops_at_any_end_token_and_keeps_it(model: Any, fitted: Fitted) -> None:
    drafter, chosen = fitted
    stopped_inside_a_window = 0
    for prompt in chosen:
        free = ReferenceEngine(model, [], drafter).speculate(prompt, 40, 4)
        for end in {free.tokens[0], free.tokens[9], free.tokens[20]}:
            expected = free.tokens[: free.tokens.index(end) + 1]
            engine = ReferenceEngine(model, [end, VOCAB + 7], drafter)
            for generation in (engine.plain(prompt, 40), engine.speculate(prompt, 40, 4)):
                assert generation.tokens == expected
                assert generation.finish_reason == "stop"
                assert generation.decode_tokens == len(expected) - 1
            made = 1 + sum(verify.accepted + 1 for verify in generation.passes)
            stopped_inside_a_window += made > len(expected)
    assert stopped_inside_a_window > 0


def test_speculation_reaches_the_last_position_of_the_context(tmp_path: Path) -> None:
    model = load(tiny_target(tmp_path / "t", context=40))
    prompt = list(range(10))
    engine = ReferenceEngine(model, [])
    sequence = prompt + engine.plain(prompt, 30).tokens
    longest = 0
    original = model.forward

    def watched(*args: Any, **kwargs: Any) -> Any:
        nonlocal longest
        longest = max(longest, kwargs["cache"].get_seq_length() + kwargs["input_ids"].shape[1])
        return original(*args, **kwargs)

    model.forward = watched
    for drafter in (tiny_drafter(tiny_shape()), Oracle(sequence)):
        engine.set_drafter(drafter)
        assert prompt + engine.speculate(prompt, 30, 5).tokens == sequence
    assert longest == 40


def test_complete_passes_drop_exactly_those_that_leave_the_answer(model: Any) -> None:
    engine = ReferenceEngine(model, [], tiny_drafter(tiny_shape()))
    for length in range(1, 12):
        generation = engine.speculate([1, 2, 3], length, 3)
        expected = []
        for verify in generation.passes:
            guessed = [verify.start + 2 + k for k in range(3)]  # indices that the chain guesses
            if all(index < 3 + len(generation.tokens) for index in guessed):
                expected.append(verify)
        assert complete_passes(generation, 3, 3) == expected


def test_impossible_requests_are_refused(model: Any) -> None:
    engine = ReferenceEngine(model, [], tiny_drafter(tiny_shape()))
    for prompt, count, message in (
        ([], 5, "at least one token"),
        ([1] * 500, 13, "at most 512"),
        ([1], 0, "at least one new token"),
        ([VOCAB], 5, f"from 0 to {VOCAB - 1}"),
        ([-1], 5, "found -1"),
    ):
        for run in (engine.plain, lambda p, n: engine.speculate(p, n, 3)):
            with pytest.raises(InputError, match=message):
                run(prompt, count)
    with pytest.raises(ConfigError, match="steps = 0"):
        engine.speculate([1], 5, 0)
    with pytest.raises(ConfigError, match="simulated acceptance"):
        engine.configure(Speculation(steps=3, simulated=2.5))
    with pytest.raises(ConfigError, match="past_end"):
        engine.generate([Work([1], 5, past_end=True)])
    with pytest.raises(ConfigError, match="no drafter"):
        ReferenceEngine(model, []).speculate([1], 5, 1)
