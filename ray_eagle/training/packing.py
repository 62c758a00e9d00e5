"""Packs: documents side by side without padding, and the indices that unrolled training needs.

Position t counts at step k if tokens t+1 .. t+2+k are all the assistant's and lie in t's document: exactly the places
where a server drafts. The sets shrink as k grows, each inside the one before, so everything but the keys and values of
step 0 is computed on the positions that count alone.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ray_eagle.hidden_states.schema import Sample, aux_states


@dataclass(frozen=True)
class StepIndex:
    """The N_k positions that count at one step, grouped by document for attention."""

    at_N: Tensor
    """[N] int64: their index t in the pack, ascending."""
    kept_N: Tensor
    """[N] int64: their row among the previous step's positions (among all T at step 0)."""
    slot_N: Tensor
    """[N] int64: their place in a [documents, width] grid."""
    width: int
    """Most positions of any document."""
    causal_BNT: Tensor
    """[documents, width, longest document] bool: which step-0 keys each grid place sees."""


@dataclass(frozen=True)
class Pack:
    """Documents side by side: T tokens, S teacher rows."""

    tokens_T: Tensor
    """[T] int64."""
    aux_TC: Tensor
    """[T, 3H] as stored, on a device as numbers."""
    aux_scale_TG: Tensor | None
    """[T, 3G] uint8 while `aux_TC` is float8, else None."""
    positions_T: Tensor
    """[T] int64: position inside the document."""
    key_slot_T: Tensor
    """[T] int64: place of each token in a [documents, longest document] grid."""
    documents: int
    longest: int
    teacher_row_T: Tensor
    """[T] int64: row of `last_SH` and `top1_S` whose state is at t; -1 where no teacher is."""
    last_SH: Tensor
    """[S, H] float: last states after the final norm."""
    top1_S: Tensor
    """[S] int64: the teacher's choice over the whole target vocabulary."""
    steps: tuple[StepIndex, ...]
    """One for each unroll step."""
    names: tuple[str, ...]
    """sample_id of each document."""

    def to(self, device: torch.device, dtype: torch.dtype) -> "Pack":
        """The pack on a device, its states in `dtype`."""
        moved = {name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)}
        moved["aux_TC"] = aux_states(moved["aux_TC"], moved.pop("aux_scale_TG", None), dtype)
        moved["last_SH"] = moved["last_SH"].to(dtype)
        steps = tuple(
            StepIndex(*(v.to(device) if isinstance(v, Tensor) else v for v in vars(step).values()))
            for step in self.steps
        )
        return replace(self, **moved, aux_scale_TG=None, steps=steps)


def counting_depth(loss_mask_T: Tensor) -> Tensor:
    """[T] int64: at how many steps each position of one document counts (steps 0 .. depth-1)."""
    length = len(loss_mask_T)
    index_T = torch.arange(length)
    # the first token at or after each position that is not the assistant's ends the run that starts there
    ends_T = torch.where(loss_mask_T.bool(), length, index_T).flip(0).cummin(0).values.flip(0)
    run_after_T = torch.cat([(ends_T - index_T)[1:], torch.zeros(1, dtype=torch.int64)])
    return (run_after_T - 1).clamp(min=0)


def make_pack(samples: list[Sample], steps: int, depths: list[Tensor] | None = None) -> Pack:
    """Pack samples for `steps` unroll steps. `depths` overrides where positions count (default: `counting_depth`)."""
    lengths = [len(s.input_ids) for s in samples]
    depth_T = torch.cat(depths or [counting_depth(s.loss_mask) for s in samples])
    positions_T = torch.cat([torch.arange(n) for n in lengths])
    document_T = torch.repeat_interleave(torch.arange(len(samples)), torch.tensor(lengths))
    teaching_T = torch.cat([torch.cat([s.loss_mask[1:].bool(), torch.zeros(1, dtype=torch.bool)]) for s in samples])
    rows_T = torch.where(teaching_T, teaching_T.cumsum(0) - 1, -1)
    longest = max(lengths)
    scales = [s.aux_scale for s in samples]
    indices, previous = [], torch.arange(len(depth_T))
    for step in range(steps):
        kept_N = (depth_T[previous] > step).nonzero()[:, 0]
        previous = previous[kept_N]
        indices.append(_step_index(previous, kept_N, document_T, positions_T, len(samples), longest))
    return Pack(
        tokens_T=torch.cat([s.input_ids for s in samples]).long(),
        aux_TC=torch.cat([s.aux for s in samples]),
        aux_scale_TG=None if scales[0] is None else torch.cat(scales),
        positions_T=positions_T,
        key_slot_T=document_T * longest + positions_T,
        documents=len(samples),
        longest=longest,
        teacher_row_T=rows_T,
        last_SH=torch.cat([s.last for s in samples]),
        top1_S=torch.cat([s.top1 for s in samples]).long(),
        steps=tuple(indices),
        names=tuple(s.sample_id for s in samples),
    )


def _step_index(
    at_N: Tensor, kept_N: Tensor, document_T: Tensor, positions_T: Tensor, documents: int, longest: int
) -> StepIndex:
    counts_B = torch.bincount(document_T[at_N], minlength=documents)
    width = max(1, int(counts_B.max()) if documents else 1)
    starts_B = counts_B.cumsum(0) - counts_B
    document_N = document_T[at_N]
    slot_N = document_N * width + torch.arange(len(at_N)) - starts_B[document_N]
    query_positions = torch.zeros(documents * width, dtype=torch.int64)
    query_positions[slot_N] = positions_T[at_N]
    causal_BNT = torch.arange(longest) <= query_positions.view(documents, width, 1)
    return StepIndex(at_N, kept_N, slot_N, width, causal_BNT)
