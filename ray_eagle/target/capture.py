"""Capture what the drafter learns from: three aux hidden states everywhere, the last state where a teacher is needed.

Samples are packed into one sequence with positions that restart, so nothing is padded and no sample sees another
(transformers keeps packed documents apart by their positions). States come from forward hooks on the decoder layers.
The head runs on supervised positions alone, in chunks; logits are reduced at once to the teacher's top-1 and log-sum-exp.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ray_eagle.target.parts import TargetParts

HEAD_CHUNK = 512


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


class AuxHooks:
    """Keeps the outputs of chosen decoder layers during forward passes; a context manager that removes its hooks."""

    def __init__(self, parts: TargetParts, aux_layers: tuple[int, ...]) -> None:
        self.outputs: dict[int, Tensor] = {}
        self._layers = aux_layers
        self._handles = [parts.layers[layer].register_forward_hook(self._keep(layer)) for layer in aux_layers]

    def _keep(self, layer: int) -> Callable[..., None]:
        def hook(module: Any, inputs: Any, output: Any) -> None:
            self.outputs[layer] = output[0] if isinstance(output, tuple) else output

        return hook

    def concatenated(self) -> Tensor:
        """[batch, T, 3H] of the last forward pass."""
        return torch.cat([self.outputs[layer] for layer in self._layers], dim=-1)

    def __enter__(self) -> "AuxHooks":
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()


@torch.inference_mode()
def capture_pack(
    parts: TargetParts, aux_layers: tuple[int, int, int], samples: list[tuple[list[int], list[int]]], dtype: torch.dtype
) -> list[States]:
    """States of packed samples (input_ids, loss_mask), in `dtype` on the CPU, in the given order."""
    device = next(parts.decoder.parameters()).device
    ids_T = torch.tensor([token for ids, _ in samples for token in ids], device=device)
    positions_T = torch.cat([torch.arange(len(ids), device=device) for ids, _ in samples])
    with AuxHooks(parts, aux_layers) as hooks:
        last_TH = parts.decoder(ids_T[None], position_ids=positions_T[None], use_cache=False).last_hidden_state[0]
        aux_TC = hooks.concatenated()[0]
    states, start = [], 0
    for ids, mask in samples:
        end = start + len(ids)
        teaching = torch.tensor(mask[1:], dtype=torch.bool, device=device)
        last_SH = last_TH[start : end - 1][teaching]
        top1_S, lse_S = teacher(parts.head, last_SH)
        states.append(States(aux_TC[start:end].to("cpu", dtype), last_SH.to("cpu", dtype), top1_S.cpu(), lse_S.cpu()))
        start = end
    return states


def teacher(head: Any, last_SH: Tensor) -> tuple[Tensor, Tensor]:
    """[S] int32 argmax and [S] float32 log-sum-exp of the head's logits, without keeping the logits."""
    top1, lse = [], []
    for chunk_SH in last_SH.split(HEAD_CHUNK):
        logits_SV = head(chunk_SH).float()
        top1.append(logits_SV.argmax(-1).int())
        lse.append(logits_SV.logsumexp(-1))
    if not top1:
        return last_SH.new_empty(0, dtype=torch.int32), last_SH.new_empty(0, dtype=torch.float32)
    return torch.cat(top1), torch.cat(lse)
