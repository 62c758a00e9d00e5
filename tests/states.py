"""States of a pack by the product's own capture, cut into samples on the CPU, and their slow twin: each sample alone."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from ray_eagle.target.capture import Stage, TokenPack
from ray_eagle.target.logits import UNCHANGED, LogitRule
from ray_eagle.target.parts import TargetParts
from tests.random_data import random_tokens
from tests.tiny import VOCAB

Samples = list[tuple[list[int], list[int]]]


@dataclass(frozen=True)
class States:
    """Hidden states of one sample of T tokens; S of them predict a supervised token (s with m[s+1] = 1)."""

    aux_TC: Tensor
    """[T, 3H]: outputs of the three aux layers, concatenated in ascending order."""
    last_SH: Tensor
    """[S, H]: the last state after the final norm."""
    top1_S: Tensor
    """[S] int32: the target's most likely next token over its whole vocabulary."""
    lse_S: Tensor
    """[S] float32: log-sum-exp of its logits."""


def capture_pack(
    parts: TargetParts,
    aux_layers: tuple[int, int, int],
    samples: Samples,
    dtype: torch.dtype,
    logits: LogitRule = UNCHANGED,
) -> list[States]:
    """States of packed samples (input_ids, loss_mask) by a whole target, in `dtype` on the CPU, in the given order."""
    pack = TokenPack.of(samples)
    device = next(parts.decoder.parameters()).device
    output = Stage(parts, range(len(parts.layers)), aux_layers, device, logits).run(pack)
    assert output.last_SH is not None and output.top1_S is not None and output.lse_S is not None
    aux_TC = torch.cat([output.aux[layer] for layer in aux_layers], dim=-1).to("cpu", dtype)
    per_sample = zip(
        aux_TC.split(pack.lengths),
        output.last_SH.to("cpu", dtype).split(pack.teaching),
        output.top1_S.cpu().split(pack.teaching),
        output.lse_S.cpu().split(pack.teaching),
        strict=True,
    )
    return [States(*tensors) for tensors in per_sample]


def plain_model(folder: Path, dtype: torch.dtype) -> Any:
    """The slow twin: transformers as it is, eager attention, experts one by one."""
    known = type(AutoConfig.from_pretrained(folder)) in AutoModelForCausalLM._model_mapping
    auto: Any = AutoModelForCausalLM if known else AutoModelForImageTextToText
    return auto.from_pretrained(folder, dtype=dtype, attn_implementation="eager", experts_implementation="eager").eval()


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


def assert_same(
    model: Any, parts: Any, layers: tuple[int, int, int], samples: Samples, atol: float, logits: LogitRule = UNCHANGED
) -> None:
    """Packed equals the slow twin and equals itself alone, to `atol` of the largest state."""
    packed = capture_pack(parts, layers, samples, torch.float32, logits)
    for (ids, mask), states in zip(samples, packed, strict=True):
        aux, last, top1, lse = slow_states(model, ids, mask, layers)
        scale = aux.abs().max().item()
        torch.testing.assert_close(states.aux_TC, aux, atol=atol * scale, rtol=0)
        torch.testing.assert_close(states.last_SH, last, atol=atol * 10, rtol=0)
        torch.testing.assert_close(states.lse_S, lse, atol=1e-3, rtol=0)
        assert states.top1_S.tolist() == top1.tolist()
        [alone] = capture_pack(parts, layers, [(ids, mask)], torch.float32)
        torch.testing.assert_close(states.aux_TC, alone.aux_TC, atol=atol * scale, rtol=0)
