"""States of a pack by the product's own capture, cut into samples on the CPU."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ray_eagle.target.capture import Stage, TokenPack
from ray_eagle.target.parts import TargetParts


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
    parts: TargetParts, aux_layers: tuple[int, int, int], samples: list[tuple[list[int], list[int]]], dtype: torch.dtype
) -> list[States]:
    """States of packed samples (input_ids, loss_mask) by a whole target, in `dtype` on the CPU, in the given order."""
    pack = TokenPack.of(samples)
    device = next(parts.decoder.parameters()).device
    output = Stage(parts, range(len(parts.layers)), aux_layers, device).run(pack)
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
