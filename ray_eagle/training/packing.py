"""Packs: documents side by side without padding, and the indices that unrolled training needs.

Position t counts at step k if tokens t+1 .. t+2+k are all the assistant's and lie in t's document: exactly the places
where a server drafts. The sets shrink as k grows, each inside the one before, so everything but the keys and values of
step 0 is computed on the positions that count alone.
"""

from collections.abc import Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
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
    token_N: Tensor
    """[N] int64: the token that each reads."""
    position_N: Tensor
    """[N] int64: its RoPE position."""
    scored_M: Tensor
    """[M] int64: rows among the N that count (all, unless positions are computed everywhere or fill up to a multiple)."""
    teacher_M: Tensor
    """[M] int64, ascending: the teacher's row of each."""
    blocks: tuple[int, ...]
    """How many of the M have a teacher row below 0, BLOCK, 2 * BLOCK, .. S."""


@dataclass(frozen=True)
class Spans:
    """Where each document's queries and keys lie. Queries run from its first computed position to its end."""

    bounds: tuple[tuple[int, int, int, int], ...]
    """(first query slot, end of slots, first key, end of keys) of each document, that of zeros too; its last slot is at its
    last key."""
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
    """sample_id of each document but that of zeros."""

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


def counting_depth(mask_T: np.ndarray, ends_T: np.ndarray) -> np.ndarray:
    """[T] int64: at how many steps each position counts (steps 0 .. depth-1).

    Of documents side by side: `mask_T` is non-zero where the assistant wrote the token, `ends_T` is where its document ends.
    """
    index_T = np.arange(len(mask_T))
    # the first token at or after each position that is not the assistant's ends the run that starts there, if no end does
    foreign_T1: np.ndarray = np.append(np.where(mask_T, len(mask_T), index_T), len(mask_T))
    stops_T = np.minimum.accumulate(foreign_T1[::-1])[::-1][1:]
    return np.maximum(np.minimum(stops_T, ends_T) - index_T - 2, 0)


def make_pack(
    samples: list[Sample], steps: int, *, everywhere: bool = False, pin: bool = False, multiple: int = 1
) -> Pack:
    """Pack samples for `steps` unroll steps.

    `everywhere` computes every position where a step is defined, though only those that count are scored: the same loss,
    for comparison. `pin`: states in page-locked memory. `multiple`: tokens, and the positions of every step, come in
    multiples of it, through a last document of zeros that is scored nowhere.
    """
    # numpy: on arrays this small its calls cost a third of torch's, and the GPU waits for them
    lengths_B = np.array([s.input_ids.shape[0] for s in samples])
    ends_T: np.ndarray = np.repeat(lengths_B.cumsum(), lengths_B)
    tokens_T = np.concatenate([s.input_ids.numpy() for s in samples]).astype(np.int64)
    mask_T = np.concatenate([s.loss_mask.numpy() for s in samples]) != 0
    depth_T = counting_depth(mask_T, ends_T)
    computed_T = ends_T - 1 - np.arange(len(ends_T)) if everywhere else depth_T
    aux = [s.aux for s in samples]
    scales = [s.aux_scale for s in samples if s.aux_scale is not None]
    if multiple > 1:
        filler_F = _filler(computed_T, steps, multiple)
        computed_T, size = np.append(computed_T, filler_F), len(filler_F)
        lengths_B, ends_T = np.append(lengths_B, size), np.append(ends_T, np.full(size, len(computed_T)))
        tokens_T, mask_T, depth_T = (np.append(x, np.zeros(size, x.dtype)) for x in (tokens_T, mask_T, depth_T))
        aux, scales = ([*x, x[0].new_zeros(size, x[0].shape[1])] if x else x for x in (aux, scales))
    index_T = np.arange(len(ends_T))
    positions_T = index_T - np.repeat(lengths_B.cumsum() - lengths_B, lengths_B)
    # a position has a teacher where the next token of its document is the assistant's
    teaching_T = np.append(mask_T[1:], False) & (index_T + 1 < ends_T)
    rows_T = np.where(teaching_T, teaching_T.cumsum() - 1, -1)
    spans, slot_T = _spans(computed_T > 0, lengths_B)
    teachers = sum(s.top1.shape[0] for s in samples)
    edges = np.array([*range(0, teachers, BLOCK), teachers])
    indices: list[StepIndex] = []
    previous, first = index_T, index_T
    for step in range(steps):
        kept_N = (computed_T[previous] > step).nonzero()[0]
        previous = previous[kept_N]
        first = first[kept_N] if step else np.arange(len(previous))
        scored_M = (depth_T[previous] > step).nonzero()[0]
        read_N = previous + 1 + step
        teacher_M = rows_T[read_N[scored_M]]
        blocks: list[int] = teacher_M.searchsorted(edges).tolist()
        arrays = {
            "at_N": previous,
            "kept_N": kept_N,
            "first_N": first,
            "slot_N": slot_T[previous],
            "token_N": tokens_T[read_N],
            "position_N": positions_T[previous] + step,
            "scored_M": scored_M,
            "teacher_M": teacher_M,
        }
        indices.append(StepIndex(**{name: torch.from_numpy(x) for name, x in arrays.items()}, blocks=tuple(blocks)))
    return Pack(
        tokens_T=torch.from_numpy(tokens_T),
        aux_TC=_join(aux, pin),
        aux_scale_TG=_join(scales, pin) if scales else None,
        positions_T=torch.from_numpy(positions_T),
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
    multiple: int = 1,
    aside: bool = False,
) -> Generator[Pack]:
    """`make_pack` of each group of sample numbers, in order. `aside`: a thread makes the next one while this one is used."""
    packs = (
        make_pack(samples, steps, everywhere=everywhere, pin=pin, multiple=multiple) for samples in data.batches(groups)
    )
    if not aside:
        yield from packs
        return
    with ThreadPoolExecutor(1, thread_name_prefix="eagle-pack") as thread:
        following = thread.submit(next, packs, None)
        while (pack := following.result()) is not None:
            following = thread.submit(next, packs, None)
            yield pack


def _filler(computed_T: np.ndarray, steps: int, multiple: int) -> np.ndarray:
    """[F]: at how many steps each position of the last document is computed."""
    missing, missing_K = 0, []
    for step in reversed(range(steps)):  # positions of a step are among those of the step before
        missing += -(int((computed_T > step).sum()) + missing) % multiple
        missing_K.append(missing)
    size = missing + steps if missing else 0  # the last of them reads tokens behind it
    size += -(len(computed_T) + size) % multiple
    index_F = np.arange(size)
    return np.sum([index_F < missing for missing in missing_K], axis=0, dtype=np.int64)


def _spans(computed_T: np.ndarray, lengths_B: np.ndarray) -> tuple[Spans, np.ndarray]:
    """The spans, and the query slot [T] of each token (meaningless outside them)."""
    keys_B1: np.ndarray = np.append(0, lengths_B.cumsum())
    # the first computed position at or after each document's first one, if it is its own
    places: np.ndarray = np.append(computed_T.nonzero()[0], len(computed_T))
    first_B = np.minimum(places[np.searchsorted(places, keys_B1[:-1])], keys_B1[1:])
    queries_B1: np.ndarray = np.append(0, (keys_B1[1:] - first_B).cumsum())
    slot_T = np.arange(len(computed_T)) + np.repeat(queries_B1[:-1] - first_B, lengths_B)
    queries, keys = queries_B1.tolist(), keys_B1.tolist()
    return Spans(
        bounds=tuple(zip(queries[:-1], queries[1:], keys[:-1], keys[1:], strict=True)),
        queries_B1=torch.from_numpy(queries_B1.astype(np.int32)),
        keys_B1=torch.from_numpy(keys_B1.astype(np.int32)),
        longest_queries=int(np.diff(queries_B1).max()),
        longest_keys=int(lengths_B.max()),
    ), slot_T


def _join(tensors: list[Tensor], pin: bool) -> Tensor:
    if not pin:
        return torch.cat(tensors)
    rows = sum(t.shape[0] for t in tensors)
    return torch.cat(tensors, out=torch.empty(rows, *tensors[0].shape[1:], dtype=tensors[0].dtype, pin_memory=True))


def _send(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.to(device, non_blocking=tensor.is_pinned())


def _ship(tensors: list[Tensor], device: torch.device) -> list[Tensor]:
    """Integer tensors on a device, as int64."""
    if device.type == "cpu":
        return tensors
    sizes = [t.shape[0] for t in tensors]
    flat = torch.cat(tensors, out=torch.empty(sum(sizes), dtype=torch.int64, pin_memory=True))
    return list(flat.to(device, non_blocking=True).split(sizes))
