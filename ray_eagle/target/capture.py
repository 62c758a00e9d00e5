"""Capture what the drafter learns from: three aux hidden states everywhere, the last state where a teacher is needed.

Samples are packed into one sequence with positions that restart, so nothing is padded and no sample sees another. A
`Stage` runs a pack through its contiguous share of the target's layers, or through all of them; the residual stream goes
from stage to stage. States come from forward hooks on the decoder layers. The head runs on supervised positions alone,
in chunks; logits are reduced at once to the teacher's top-1 and log-sum-exp.

On a GPU nothing here waits for it: every index is computed on the CPU and travels from pinned memory.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ray_eagle.errors import TargetError
from ray_eagle.target.attention import PACKED, document_arguments
from ray_eagle.target.logits import UNCHANGED, LogitRule
from ray_eagle.target.parts import TargetParts

HEAD_CHUNK = 512
CUDA_LOGITS_BYTES = 2**30
FLASH_ATTENTION = "flash_attention"


@dataclass(frozen=True)
class TokenPack:
    """Samples side by side, T tokens in all, on the CPU. S of the positions predict a supervised token."""

    ids_T: Tensor
    """[T] int64."""
    positions_T: Tensor
    """[T] int64: positions inside each sample."""
    lengths: list[int]
    """Tokens of each sample, in order."""
    bounds_N1: Tensor
    """[N + 1] int32: where samples start and end."""
    rows_S: Tensor
    """[S] int64: indices in the pack of the positions s with m[s+1] = 1 in their own sample."""
    teaching: list[int]
    """How many of those each sample has."""

    @classmethod
    def of(cls, samples: Sequence[tuple[Sequence[int], Sequence[int]]]) -> "TokenPack":
        """Pack (input_ids, loss_mask) pairs in the given order; at least one sample, none empty."""
        lengths = [len(ids) for ids, _ in samples]
        bounds = np.concatenate([[0], np.cumsum(lengths)])
        ids = np.concatenate([np.asarray(ids, dtype=np.int64) for ids, _ in samples])
        supervised = np.concatenate([np.asarray(mask, dtype=bool) for _, mask in samples])
        supervised[bounds[:-1]] = False  # a first token is predicted by nothing: the one before it is another sample's
        teaching = np.add.reduceat(supervised.astype(np.int64), bounds[:-1])
        return cls(
            torch.from_numpy(ids),
            torch.from_numpy(np.arange(bounds[-1]) - np.repeat(bounds[:-1], lengths)),
            lengths,
            torch.from_numpy(bounds.astype(np.int32)),
            torch.from_numpy(np.flatnonzero(supervised) - 1),
            teaching.tolist(),
        )


@dataclass(frozen=True)
class StageOutput:
    """What one stage makes of a pack, on its own device. On a GPU the kernels may still run."""

    hidden_TH: Tensor | None
    """[T, H]: the residual stream for the next stage; None from the last."""
    aux: dict[int, Tensor]
    """Layer id -> [T, H]: outputs of the aux layers that this stage holds."""
    last_SH: Tensor | None = None
    """[S, H]: the last state after the final norm at `rows_S`; from the last stage alone, as are the next two."""
    top1_S: Tensor | None = None
    """[S] int32: the target's most likely next token over its whole vocabulary."""
    lse_S: Tensor | None = None
    """[S] float32: log-sum-exp of its logits."""


@dataclass(frozen=True)
class Stage:
    """A contiguous share of a target's layers, ready to run; all of them make the whole target."""

    parts: TargetParts
    layers: range
    """The layers that are really here; `parts.layers` has a place for every layer of the target."""
    aux_layers: tuple[int, ...]
    """All aux layers of the run, here or not."""
    device: torch.device
    logits: LogitRule = UNCHANGED
    """What the target does to its head's output."""

    @property
    def first(self) -> bool:
        """Whether it holds the embedding and takes no hidden states."""
        return self.layers.start == 0

    @property
    def last(self) -> bool:
        """Whether it holds the final norm and the head."""
        return self.layers.stop == len(self.parts.layers)

    @torch.inference_mode()
    def run(self, pack: TokenPack, hidden_TH: Tensor | None = None) -> StageOutput:
        """Run a pack. `hidden_TH` [T, H] is the previous stage's, on any device; the first stage takes none.

        Raises TargetError when hidden states are given to the first stage, or none to a later one.
        """
        if self.first != (hidden_TH is None):
            raise TargetError(
                f"stage of layers {self.layers.start}-{self.layers.stop - 1}: expected "
                f"{'no hidden states, since it is the first' if self.first else 'the hidden states of the stage before'}."
            )
        with AuxHooks(self.parts, tuple(layer for layer in self.aux_layers if layer in self.layers)) as hooks:
            states_TH = self.decode(pack, hidden_TH)
            aux = {layer: output[0] for layer, output in hooks.outputs.items()}
        if not self.last:
            return StageOutput(states_TH, aux)
        last_SH = states_TH.index_select(0, to_device(pack.rows_S, self.device))
        return StageOutput(None, aux, last_SH, *teacher(self.parts.head, last_SH, self.logits))

    def decode(self, pack: TokenPack, hidden_TH: Tensor | None) -> Tensor:
        """[T, H]: the residual stream after this stage's layers, after the final norm in the last stage."""
        return self.parts.decoder(**self.decoder_arguments(pack, hidden_TH)).last_hidden_state[0]

    def decoder_arguments(self, pack: TokenPack, hidden_TH: Tensor | None) -> dict[str, Any]:
        """What transformers' decoder is called with, on its device."""
        arguments: dict[str, Any] = {"position_ids": to_device(pack.positions_T, self.device)[None], "use_cache": False}
        attention = self.parts.decoder.config._attn_implementation
        if attention == PACKED or attention.startswith(FLASH_ATTENTION):
            arguments |= document_arguments(to_device(pack.bounds_N1, self.device), max(pack.lengths))
        if hidden_TH is None:
            return arguments | {"input_ids": to_device(pack.ids_T, self.device)[None]}
        return arguments | {"inputs_embeds": to_device(hidden_TH, self.device)[None]}


class AuxHooks:
    """Keeps the outputs of chosen decoder layers during forward passes; a context manager that removes its hooks."""

    def __init__(self, parts: TargetParts, aux_layers: tuple[int, ...]) -> None:
        self.outputs: dict[int, Tensor] = {}
        self._handles = [parts.layers[layer].register_forward_hook(self._keep(layer)) for layer in aux_layers]

    def _keep(self, layer: int) -> Callable[..., None]:
        def hook(module: Any, inputs: Any, output: Any) -> None:
            self.outputs[layer] = output[0] if isinstance(output, tuple) else output

        return hook

    def __enter__(self) -> "AuxHooks":
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()


def teacher(head: Any, last_SH: Tensor, rule: LogitRule) -> tuple[Tensor, Tensor]:
    """[S] int32 argmax and [S] float32 log-sum-exp of the target's logits, without keeping the logits.

    On a GPU a chunk's float32 logits take at most CUDA_LOGITS_BYTES; they are the only float32 copy.
    """
    rows = len(last_SH)
    top1_S = torch.empty(rows, dtype=torch.int32, device=last_SH.device)
    lse_S = torch.empty(rows, dtype=torch.float32, device=last_SH.device)
    chunk = HEAD_CHUNK
    if last_SH.is_cuda:
        chunk = max(1, CUDA_LOGITS_BYTES // (4 * head.weight.shape[0]))
    for start, end in pairwise([*range(0, rows, chunk), rows]):
        output_SV = head(last_SH[start:end])
        highest_S1, best_S1 = output_SV.max(dim=-1, keepdim=True)
        top1_S[start:end] = best_S1[:, 0]
        highest_S1 = rule.apply_(highest_S1.float())
        exp_SV = rule.apply_(output_SV.float()).sub_(highest_S1).exp_()
        lse_S[start:end] = exp_SV.sum(-1).log_().add_(highest_S1[:, 0])
    return top1_S, lse_S


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """On the device; from the CPU to a GPU through pinned memory, without waiting for it."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
