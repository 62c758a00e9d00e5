"""Packs: documents side by side without padding, and the indices that unrolled training needs.

Position t counts at step k if tokens t+1 .. t+2+k are all the assistant's and lie in t's document: exactly the places
where a server drafts. The sets shrink as k grows, each inside the one before, so everything but the keys and values of
step 0 is computed on the positions that count alone.
"""

from collections.abc import Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ray_eagle.hidden_states.reader import HiddenStates
from ray_eagle.hidden_states.schema import Sample, aux_states

BLOCK = 256
"""Teacher rows: head and loss go through a pack in chunks of a multiple of it."""


@dataclass(frozen=True)
class StepIndex:
    """The N positions that are computed at one step."""

    at_N: Tensor
    """[N] int64: their index t in the pack, ascending."""
    kept_N: Tensor
    """[N] int64: their row among the previous step's positions (among all T at step 0)."""
    first_N: Tensor
    """[N] int64: their row among step 0's positions."""
    slot_N: Tensor
    """[N] int64: their place among the query slots of `Spans`."""
    scored_M: Tensor
    """[M] int64: rows among the N that count (all of them, unless positions are computed everywhere)."""
    teacher_M: Tensor
    """[M] int64, ascending: the teacher's row of each."""
    blocks: tuple[int, ...]
    """How many of the M have a teacher row below 0, BLOCK, 2 * BLOCK, .. S."""


@dataclass(frozen=True)
class Spans:
    """Where each document's queries and keys lie. Queries run from its first computed position to its end."""

    bounds: tuple[tuple[int, int, int, int], ...]
    """(first query slot, end of slots, first key, end of keys) of each document; its last slot is at its last key."""
    queries_B1: Tensor
    """[B + 1] int32: the same bounds as offsets, for flash attention."""
    keys_B1: Tensor
    """[B + 1] int32."""
    longest_queries: int
    longest_keys: int

    @property
    def slots(self) -> int:
        """Query slots of all documents together."""
        return self.bounds[-1][1]


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
    last_SH: Tensor
    """[S, H] float: last states after the final norm."""
    top1_S: Tensor
    """[S] int64: the teacher's choice over the whole target vocabulary."""
    steps: tuple[StepIndex, ...]
    """One for each unroll step."""
    spans: Spans
    names: tuple[str, ...]
    """sample_id of each document."""

    def to(self, device: torch.device, dtype: torch.dtype) -> "Pack":
        """The pack on a device, its states in `dtype`. Copies to a GPU do not wait for it; all indices travel as one tensor."""
        steps = [vars(step) for step in self.steps]
        tensors = [self.tokens_T, self.positions_T, self.top1_S, self.spans.queries_B1, self.spans.keys_B1]
        tensors += [value for step in steps for value in step.values() if isinstance(value, Tensor)]
        moved = iter(_ship(tensors, device))
        tokens_T, positions_T, top1_S, queries_B1, keys_B1 = (next(moved) for _ in range(5))
        scale_TG = None if self.aux_scale_TG is None else _send(self.aux_scale_TG, device)
        return replace(
            self,
            tokens_T=tokens_T,
            positions_T=positions_T,
            top1_S=top1_S,
            aux_TC=aux_states(_send(self.aux_TC, device), scale_TG, dtype),
            aux_scale_TG=None,
            last_SH=_send(self.last_SH, device).to(dtype),
            spans=replace(self.spans, queries_B1=queries_B1.int(), keys_B1=keys_B1.int()),
            steps=tuple(
                StepIndex(**{name: next(moved) if isinstance(v, Tensor) else v for name, v in step.items()})
                for step in steps
            ),
        )


def counting_depth(loss_mask_T: Tensor) -> Tensor:
    """[T] int64: at how many steps each position of one document counts (steps 0 .. depth-1)."""
    length = len(loss_mask_T)
    index_T = torch.arange(length)
    # the first token at or after each position that is not the assistant's ends the run that starts there
    ends_T = torch.where(loss_mask_T.bool(), length, index_T).flip(0).cummin(0).values.flip(0)
    run_after_T = torch.cat([(ends_T - index_T)[1:], torch.zeros(1, dtype=torch.int64)])
    return (run_after_T - 1).clamp(min=0)


def make_pack(samples: list[Sample], steps: int, *, everywhere: bool = False, pin: bool = False) -> Pack:
    """Pack samples for `steps` unroll steps.

    `everywhere` computes every position where a step is defined, though only those that count are scored: the same loss,
    for comparison. `pin`: states in page-locked memory.
    """
    lengths = [len(s.input_ids) for s in samples]
    depth_T = torch.cat([counting_depth(s.loss_mask) for s in samples])
    positions_T = torch.cat([torch.arange(n) for n in lengths])
    document_T = torch.repeat_interleave(torch.arange(len(samples)), torch.tensor(lengths))
    teaching_T = torch.cat([torch.cat([s.loss_mask[1:].bool(), torch.zeros(1, dtype=torch.bool)]) for s in samples])
    rows_T = torch.where(teaching_T, teaching_T.cumsum(0) - 1, -1)
    computed_T = torch.tensor(lengths)[document_T] - 1 - positions_T if everywhere else depth_T
    spans, slot_T = _spans(computed_T > 0, lengths)
    teachers = sum(len(s.top1) for s in samples)
    indices: list[StepIndex] = []
    previous, first = torch.arange(len(depth_T)), None
    for step in range(steps):
        kept_N = (computed_T[previous] > step).nonzero()[:, 0]
        previous = previous[kept_N]
        first = torch.arange(len(previous)) if first is None else first[kept_N]
        scored_M = (depth_T[previous] > step).nonzero()[:, 0]
        teacher_M = rows_T[(previous[scored_M] + 1 + step).clamp(max=len(rows_T) - 1)]
        edges = torch.tensor([*range(0, teachers, BLOCK), teachers])
        blocks = tuple(torch.searchsorted(teacher_M, edges).tolist())
        indices.append(StepIndex(previous, kept_N, first, slot_T[previous], scored_M, teacher_M, blocks))
    scales = [s.aux_scale for s in samples]
    return Pack(
        tokens_T=torch.cat([s.input_ids for s in samples]).long(),
        aux_TC=_join([s.aux for s in samples], pin),
        aux_scale_TG=None if scales[0] is None else torch.cat(scales),
        positions_T=positions_T,
        last_SH=_join([s.last for s in samples], pin),
        top1_S=torch.cat([s.top1 for s in samples]).long(),
        steps=tuple(indices),
        spans=spans,
        names=tuple(s.sample_id for s in samples),
    )


def read_packs(
    data: HiddenStates,
    groups: Iterable[list[int]],
    steps: int,
    *,
    everywhere: bool = False,
    pin: bool = False,
    aside: bool = False,
) -> Generator[Pack]:
    """The pack of each group of sample numbers, in order. `aside`: a thread makes the next one while this one is used."""
    packs = (make_pack(samples, steps, everywhere=everywhere, pin=pin) for samples in data.batches(groups))
    if not aside:
        yield from packs
        return
    with ThreadPoolExecutor(1, thread_name_prefix="eagle-pack") as thread:
        following = thread.submit(next, packs, None)
        while (pack := following.result()) is not None:
            following = thread.submit(next, packs, None)
            yield pack


def _spans(computed_T: Tensor, lengths: list[int]) -> tuple[Spans, Tensor]:
    """The spans, and the query slot [T] of each token (meaningless outside them)."""
    bounds, slots = [], []
    query = key = 0
    for computed, length in zip(computed_T.split(lengths), lengths, strict=True):
        first = int(computed.int().argmax()) if computed.any() else length
        slots.append(query - first + torch.arange(length))
        bounds.append((query, query + length - first, key, key + length))
        query, key = query + length - first, key + length
    queries_B1, keys_B1 = (torch.tensor([0, *(bound[end] for bound in bounds)], dtype=torch.int32) for end in (1, 3))
    longest_queries = max(q1 - q0 for q0, q1, _, _ in bounds)
    return Spans(tuple(bounds), queries_B1, keys_B1, longest_queries, max(lengths)), torch.cat(slots)


def _join(tensors: list[Tensor], pin: bool) -> Tensor:
    if not pin:
        return torch.cat(tensors)
    rows = sum(len(t) for t in tensors)
    out = torch.empty(rows, *tensors[0].shape[1:], dtype=tensors[0].dtype, pin_memory=True)
    for part, tensor in zip(out.split([len(t) for t in tensors]), tensors, strict=True):
        part.copy_(tensor)
    return out


def _send(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.to(device, non_blocking=tensor.is_pinned())


def _ship(tensors: list[Tensor], device: torch.device) -> list[Tensor]:
    """Integer tensors on a device, as int64."""
    if device.type == "cpu":
        return tensors
    flat = torch.cat([t.long() for t in tensors]).pin_memory()
    return list(flat.to(device, non_blocking=True).split([len(t) for t in tensors]))
