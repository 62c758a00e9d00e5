# mypy: allow-untyped-defs
"""Triton kernels of the training step, each with a plain twin: the merge of own keys (attention.py), the losses (losses.py).

Imported on NVIDIA GPUs alone.
"""

import torch
import triton
import triton.language as tl

from ray_eagle.training import fp8

LOSS_BLOCK = 4096
LARGEST_BLOCK = 8192
LARGEST_PROGRAMS = 1024
TILE = 128


def merge(queries_NAE, output_QAE, lse_AQ, seen, own, index, scale):
    """`attention.merge` of a step's rows, taken from their slots. Output [N, A, E], log-sum-exp [N, A] float32."""
    count, heads, width = queries_NAE.shape
    if not own and count == len(output_QAE):
        return output_QAE, lse_AQ.T.contiguous()
    groups = seen.keys_TGE.shape[1]
    output_NAE = torch.empty_like(queries_NAE)
    lse_NA = torch.empty(count, heads, dtype=torch.float32, device=queries_NAE.device)
    if count:
        _merge[(count, groups)](
            queries_NAE, output_QAE, lse_AQ, seen.own_keys_KNGE, seen.own_values_KNGE, index.first_N, index.slot_N,
            output_NAE, lse_NA, own, len(output_QAE), _rows(seen), scale,
            **_sizes(heads, groups, width),
        )  # fmt: skip
    return output_NAE, lse_NA


def merge_backward(grad_NAE, queries_NAE, output_NAE, lse_NA, grad_queries_QAE, seen, gradients, own, index, scale):
    """`attention.merge_backward`, added to the queries' gradient that flash attention left in the slots."""
    count, heads, width = queries_NAE.shape
    if not own and count == len(grad_queries_QAE):
        return grad_queries_QAE
    groups = seen.keys_TGE.shape[1]
    grad_queries_NAE = torch.empty_like(queries_NAE)
    if count:
        _merge_backward[(count, groups)](
            grad_NAE.contiguous(), queries_NAE, output_NAE, lse_NA, grad_queries_QAE,
            seen.own_keys_KNGE, seen.own_values_KNGE, gradients.own_keys_KNGE, gradients.own_values_KNGE,
            index.first_N, index.slot_N, grad_queries_NAE, own, _rows(seen), scale,
            **_sizes(heads, groups, width),
        )  # fmt: skip
    return grad_queries_NAE


def row_losses(logits_RD, teacher_SD, row_R, target_R, weight_R, objective):
    """`losses.row_losses`, each row of both logits read once or twice; gradients overwrite the logits."""
    rows, size = logits_RD.shape
    losses_R = torch.empty(rows, dtype=torch.float32, device=logits_RD.device)
    best_R = torch.empty(rows, dtype=torch.int64, device=logits_RD.device)
    if rows:
        assert logits_RD.is_contiguous() and teacher_SD.is_contiguous()
        _row_losses[(rows,)](
            logits_RD, teacher_SD, row_R, target_R, losses_R if weight_R is None else weight_R, losses_R, best_R,
            size, objective.rate, OBJECTIVE=objective.kind, HARD=objective.labels == "hard",
            BACKWARD=weight_R is not None, BLOCK=min(LOSS_BLOCK, triton.next_power_of_2(size)), num_warps=8,
        )  # fmt: skip
    return losses_R, best_R


def quantise(parts, kind, values, turned):
    """`fp8.plain_quantise`: each part is read twice, first for the largest magnitude; both forms are written from one tile."""
    parts = [part.contiguous() for part in parts]
    columns, device = parts[0].shape[1], parts[0].device
    rooms = [triton.cdiv(len(part), fp8.MULTIPLE) * fp8.MULTIPLE for part in parts]
    padded = sum(rooms)
    values_MN, turned_NM = (
        torch.empty(shape if wanted else (0, 0), dtype=kind, device=device)
        for shape, wanted in (((padded, columns), values), ((columns, padded), turned))
    )
    largest = torch.zeros((), dtype=torch.int32, device=device)
    scale = torch.empty((), dtype=torch.float32, device=device)
    for part in parts:
        if count := part.numel():
            programs = min(triton.cdiv(count, LARGEST_BLOCK), LARGEST_PROGRAMS)
            rounds = triton.cdiv(count, programs * LARGEST_BLOCK)
            _largest[(programs,)](part, largest, count, programs, rounds, BLOCK=LARGEST_BLOCK, num_warps=8)
    start = 0
    for part, room in zip(parts, rooms, strict=True):
        grid = (max(1, triton.cdiv(room, TILE)), max(1, triton.cdiv(columns, TILE)))
        _quantise[grid](
            part, largest, scale, values_MN[start:], turned_NM[:, start:], len(part), columns, room, padded,
            torch.finfo(kind).max, fp8.SMALLEST, VALUES=values, TURNED=turned, TILE=TILE, num_warps=8,
        )  # fmt: skip
        start += room
    return values_MN, turned_NM, scale


def _rows(seen) -> int:
    """Rows of one step's own keys."""
    return seen.own_keys_KNGE.shape[1]


def _sizes(heads: int, groups: int, width: int) -> dict[str, int]:
    shared = heads // groups
    return {
        "GROUPS": groups,
        "SHARED": shared,
        "WIDTH": width,
        "SHARED_BLOCK": triton.next_power_of_2(shared),
        "WIDTH_BLOCK": triton.next_power_of_2(width),
        "num_warps": 1 if shared * width <= 256 else 2,
    }


@triton.jit
def _merge(
    queries, seen_output, seen_lse, own_keys, own_values, first, slot, output, lse, own, slots, rows, scale,
    GROUPS: tl.constexpr, SHARED: tl.constexpr, WIDTH: tl.constexpr,
    SHARED_BLOCK: tl.constexpr, WIDTH_BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: one position, the query heads that share one key head."""
    n, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place, own_row = tl.load(slot + n), tl.load(first + n)
    head, e = tl.arange(0, SHARED_BLOCK), tl.arange(0, WIDTH_BLOCK)
    head_mask, e_mask = head < SHARED, e < WIDTH
    mask = head_mask[:, None] & e_mask[None, :]
    at = (group * SHARED + head)[:, None] * WIDTH + e[None, :]
    size = GROUPS * SHARED * WIDTH
    q = tl.load(queries + n * size + at, mask, other=0.0).to(tl.float32)
    total = tl.load(seen_output + place * size + at, mask, other=0.0).to(tl.float32)
    top = tl.load(seen_lse + (group * SHARED + head) * slots + place, head_mask, other=0.0).to(tl.float32)
    weight = tl.full((SHARED_BLOCK,), 1.0, tl.float32)
    for i in range(own):
        own_at = ((i * rows + own_row) * GROUPS + group) * WIDTH + e
        key = tl.load(own_keys + own_at, e_mask, other=0.0).to(tl.float32)
        value = tl.load(own_values + own_at, e_mask, other=0.0).to(tl.float32)
        score = tl.sum(q * key[None, :], 1) * scale
        higher = tl.maximum(top, score)
        before, now = tl.exp(top - higher), tl.exp(score - higher)
        total = total * before[:, None] + now[:, None] * value[None, :]
        weight = weight * before + now
        top = higher
    tl.store(output + n * size + at, total / weight[:, None], mask)
    tl.store(lse + n * GROUPS * SHARED + group * SHARED + head, top + tl.log(weight), head_mask)


@triton.jit
def _merge_backward(
    grad, queries, output, lse, seen_grad, own_keys, own_values, own_keys_grad, own_values_grad, first, slot,
    grad_queries, own, rows, scale,
    GROUPS: tl.constexpr, SHARED: tl.constexpr, WIDTH: tl.constexpr,
    SHARED_BLOCK: tl.constexpr, WIDTH_BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: one position, the query heads that share one key head; nobody else touches that position's own keys."""
    n, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place, own_row = tl.load(slot + n), tl.load(first + n)
    head, e = tl.arange(0, SHARED_BLOCK), tl.arange(0, WIDTH_BLOCK)
    head_mask, e_mask = head < SHARED, e < WIDTH
    mask = head_mask[:, None] & e_mask[None, :]
    at = (group * SHARED + head)[:, None] * WIDTH + e[None, :]
    size = GROUPS * SHARED * WIDTH
    q = tl.load(queries + n * size + at, mask, other=0.0).to(tl.float32)
    d = tl.load(grad + n * size + at, mask, other=0.0).to(tl.float32)
    out = tl.load(output + n * size + at, mask, other=0.0).to(tl.float32)
    sums = tl.load(lse + n * GROUPS * SHARED + group * SHARED + head, head_mask, other=0.0)
    delta = tl.sum(d * out, 1)
    found = tl.load(seen_grad + place * size + at, mask, other=0.0).to(tl.float32)
    for i in range(own):
        own_at = ((i * rows + own_row) * GROUPS + group) * WIDTH + e
        key = tl.load(own_keys + own_at, e_mask, other=0.0).to(tl.float32)
        value = tl.load(own_values + own_at, e_mask, other=0.0).to(tl.float32)
        weight = tl.exp(tl.sum(q * key[None, :], 1) * scale - sums)
        score = weight * (tl.sum(d * value[None, :], 1) - delta) * scale
        found += score[:, None] * key[None, :]
        new_key = tl.sum(score[:, None] * q, 0) + tl.load(own_keys_grad + own_at, e_mask, other=0.0).to(tl.float32)
        new_value = tl.sum(weight[:, None] * d, 0) + tl.load(own_values_grad + own_at, e_mask, other=0.0).to(tl.float32)
        tl.store(own_keys_grad + own_at, new_key, e_mask)
        tl.store(own_values_grad + own_at, new_value, e_mask)
    tl.store(grad_queries + n * size + at, found, mask)


@triton.jit
def _row_losses(
    logits, teacher, teacher_row, target, weights, losses, best, size, rate,
    OBJECTIVE: tl.constexpr, HARD: tl.constexpr, BACKWARD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: one row. First the sums of both softmaxes, then (if asked) the acceptance, then the gradient."""
    r = tl.program_id(0).to(tl.int64)
    label = tl.load(target + r)
    here = logits + r * size
    there = teacher + tl.load(teacher_row + r) * size
    block = tl.arange(0, BLOCK)
    z_top, z_sum, t_top, t_sum, dot = float("-inf"), 0.0, float("-inf"), 0.0, 0.0
    choice = label * 0
    for start in range(0, size, BLOCK):
        mask = start + block < size
        z = tl.load(here + start + block, mask, other=float("-inf")).to(tl.float32)
        highest, at = tl.max(z, 0, return_indices=True)
        choice = tl.where(highest > z_top, (start + at).to(tl.int64), choice)
        higher = tl.maximum(z_top, highest)
        z_sum = z_sum * tl.exp(z_top - higher) + tl.sum(tl.exp(z - higher), 0)
        z_top = higher
        if not HARD:
            t = tl.load(there + start + block, mask, other=float("-inf")).to(tl.float32)
            higher = tl.maximum(t_top, tl.max(t, 0))
            before, e = tl.exp(t_top - higher), tl.exp(t - higher)
            t_sum = t_sum * before + tl.sum(e, 0)
            dot = dot * before + tl.sum(tl.where(mask, e * z, 0.0), 0)
            t_top = higher
    z_lse = z_top + tl.log(z_sum)
    if HARD:
        entropy = tl.where(label >= 0, z_lse - tl.load(here + tl.maximum(label, 0)).to(tl.float32), 0.0)
    else:
        entropy = z_lse - dot / t_sum
        t_lse = t_top + tl.log(t_sum)
    share, accepted, below = 1.0, 0.0, 0.0
    if OBJECTIVE != "soft-ce":
        for start in range(0, size, BLOCK):
            mask = start + block < size
            z = tl.load(here + start + block, mask, other=float("-inf")).to(tl.float32)
            q = tl.exp(z - z_lse)
            if HARD:
                p = tl.where(start + block == label, 1.0, 0.0)
            else:
                p = tl.exp(tl.load(there + start + block, mask, other=float("-inf")).to(tl.float32) - t_lse)
            accepted += tl.sum(tl.minimum(p, q), 0)
            below += tl.sum(tl.where(q < p, q, 0.0), 0)
        share = tl.exp(-rate * accepted) if OBJECTIVE == "mix" else 0.0
    tl.store(losses + r, share * entropy + (1.0 - share) * (1.0 - accepted))
    tl.store(best + r, choice)
    if BACKWARD:
        weight = tl.load(weights + r)
        for start in range(0, size, BLOCK):
            mask = start + block < size
            z = tl.load(here + start + block, mask, other=float("-inf")).to(tl.float32)
            q = tl.exp(z - z_lse)
            if HARD:
                p = tl.where(start + block == label, 1.0, 0.0)
            else:
                p = tl.exp(tl.load(there + start + block, mask, other=float("-inf")).to(tl.float32) - t_lse)
            gradient = share * (q - p)
            if OBJECTIVE != "soft-ce":
                gradient += (1.0 - share) * q * (below - tl.where(q < p, 1.0, 0.0))
            tl.store(here + start + block, (gradient * weight).to(logits.dtype.element_ty), mask)


@triton.jit
def _largest(x, largest, count, programs, rounds, BLOCK: tl.constexpr):
    """The largest magnitude, as the bits of a float32: those of positive numbers sort like them, and a NaN above all."""
    block = tl.arange(0, BLOCK)
    found = tl.zeros((BLOCK,), tl.int32)
    for i in range(rounds):
        at = (tl.program_id(0) + i * programs).to(tl.int64) * BLOCK + block
        value = tl.load(x + at, at < count, other=0.0).to(tl.float32)
        found = tl.maximum(found, value.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    tl.atomic_max(largest, tl.max(found, 0))


@triton.jit
def _quantise(
    x, largest, scale, values, turned, rows, columns, room, padded, most, smallest,
    VALUES: tl.constexpr, TURNED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One program: one tile of a part of `rows` rows in a place of `room`, zeros beyond; the whole matrix has `padded`."""
    bits = tl.load(largest)
    top = bits.to(tl.float32, bitcast=True)
    unit = tl.where(top < smallest, smallest, top) / most  # a NaN stays one
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(scale, unit)
    row = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    column = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = (row < room)[:, None] & (column < columns)[None, :]
    real = (row < rows)[:, None] & (column < columns)[None, :]
    value = tl.load(x + row[:, None] * columns + column[None, :], real, other=0.0).to(tl.float32) / unit
    small = tl.minimum(tl.maximum(value, -most), most)
    if VALUES:
        there = values + row[:, None] * columns + column[None, :]
        tl.store(there, small.to(values.dtype.element_ty), inside)
    if TURNED:
        there = turned + column[:, None] * padded + row[None, :]
        tl.store(there, tl.trans(small.to(turned.dtype.element_ty)), tl.trans(inside))
