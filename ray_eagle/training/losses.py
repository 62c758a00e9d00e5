"""Head and loss of all unroll steps, in chunks: never more than a chunk of rows times D logits exists.

Rows are grouped by their teacher: the teacher's logits over the draft vocabulary are computed once, for the up to K steps
that it teaches. The loss is a weighted sum whose weights are known before the forward pass, so gradients are computed while
the logits are there.

With p the teacher's distribution over the draft vocabulary (soft labels, or 1 at its choice) and q the drafter's:
    soft-ce     -sum p log q
    acceptance  1 - a, where a = sum min(p, q) is the chance that sampled speculation accepts a draft
    mix         m * soft-ce + (1 - m) * (1 - a), m = exp(-3 a) taken as a constant: positions that are drafted badly learn
                from the cross-entropy, whose gradient does not vanish, and the better they get the more from acceptance
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ray_eagle.target.logits import UNCHANGED, LogitRule
from ray_eagle.training.packing import BLOCK, Pack
from ray_eagle.training.pointwise import wide
from ray_eagle.training.weights import Weights, joined, wide_product

ROWS = 8192
"""Rows of draft logits that exist at once on a GPU,"""
ROWS_CPU = 1024
"""and on a CPU."""
CACHED = 2**18
"""Logits that the plain loss takes at once: its passes over them should find them in a cache."""


@dataclass(frozen=True)
class Objective:
    """What a position's loss is."""

    kind: Literal["soft-ce", "acceptance", "mix"] = "soft-ce"
    labels: Literal["soft", "hard"] = "soft"
    """soft: the teacher's distribution. hard: all of it on the teacher's choice."""
    rate: float = 3.0
    """Of `mix`."""
    logits: LogitRule = UNCHANGED
    """What the target, the teacher, does to its head's output."""


@dataclass(frozen=True)
class StepScores:
    """What one unroll step says about the N positions that count, without gradients."""

    at_N: Tensor
    """[N] int64 index in the pack."""
    losses_N: Tensor
    """[N] float32 or wider; only rows with `enters_N` are part of the loss."""
    enters_N: Tensor
    """[N] bool: the teacher's choice lies in the draft vocabulary."""
    right_N: Tensor
    """[N] bool: the drafter's choice is the teacher's (never so outside the draft vocabulary)."""


def head_and_loss(
    weights: Weights,
    outputs: list[Tensor],
    pack: Pack,
    draft_head_DH: Tensor,
    objective: Objective,
    weights_K: Tensor | None = None,
) -> tuple[list[StepScores], list[Tensor]]:
    """Score the un-normed outputs [N, H] of each step; `draft_head_DH` are the target's head rows of the draft vocabulary.

    With `weights_K` also the gradients [N, H] of sum_k weights_k * (losses of step k that enter), of each output; those of
    the head and the final norm are added to their buffers.
    """
    target_S = weights.drafts_V[pack.top1_S]
    pieces: list[list[tuple[Tensor, ...]]] = [[] for _ in pack.steps]
    gradients = [] if weights_K is None else [torch.empty_like(u) for u in outputs]
    scored = [len(step.scored_M) for step in pack.steps]
    is_sparse = [len(u) > count for u, count in zip(outputs, scored, strict=True)]
    for gradient, sparse in zip(gradients, is_sparse, strict=False):
        if sparse:
            gradient.zero_()
    blocks = max(1, (ROWS if target_S.is_cuda else ROWS_CPU) // (BLOCK * len(pack.steps)))
    last = len(pack.steps[0].blocks) - 1
    if not last:  # no teacher at all
        nothing = target_S >= 0
        pieces = [[(wide(outputs[0][:0, 0]), nothing, nothing)] for _ in pack.steps]
    for block in range(0, last, blocks):
        end = min(block + blocks, last)
        parts = [slice(step.blocks[block], step.blocks[end]) for step in pack.steps]
        rows = [
            step.scored_M[part] if sparse else part
            for step, part, sparse in zip(pack.steps, parts, is_sparse, strict=False)
        ]
        counts = [part.stop - part.start for part in parts]
        first = block * BLOCK
        teacher_SD = objective.logits.apply_(wide_product(pack.last_SH[first : end * BLOCK], draft_head_DH.T))
        output_RH = torch.cat([u[r] for u, r in zip(outputs, rows, strict=True)])
        normed_RH = weights.pointwise.norm(output_RH, weights.final_norm.value, weights.eps)
        logits_RD = weights.head.product(normed_RH)
        teacher_R = torch.cat([s.teacher_M[part] for s, part in zip(pack.steps, parts, strict=True)])
        target_R = target_S[teacher_R]
        enters_R = target_R >= 0
        weight_R = None
        if weights_K is not None:
            weight_R = torch.cat([w.expand(n) for w, n in zip(weights_K, counts, strict=True)]) * enters_R
        losses_R, best_R = row_losses(logits_RD, teacher_SD, teacher_R - first, target_R, weight_R, objective)
        found = [x.split(counts) for x in (losses_R, enters_R, best_R == target_R)]
        for step_pieces, *piece in zip(pieces, *found, strict=True):
            step_pieces.append(tuple(piece))
        if weights_K is not None:
            grad_RH = weights.head.backward(logits_RD, normed_RH)
            grad_RH, grad_H = weights.pointwise.norm_backward(grad_RH, output_RH, weights.final_norm.value, weights.eps)
            weights.final_norm.add(grad_H)
            for gradient, row, part in zip(gradients, rows, grad_RH.split(counts), strict=True):
                gradient[row] = part
    scores = [
        StepScores(step.at_N[step.scored_M] if sparse else step.at_N, *map(joined, zip(*step_pieces, strict=True)))
        for step, sparse, step_pieces in zip(pack.steps, is_sparse, pieces, strict=True)
    ]
    return scores, gradients


def row_losses(
    logits_RD: Tensor,
    teacher_SD: Tensor,
    row_R: Tensor,
    target_R: Tensor,
    weight_R: Tensor | None,
    objective: Objective,
) -> tuple[Tensor, Tensor]:
    """Losses [R] and choices [R] int64 of rows of draft logits; with `weight_R` the gradients overwrite the logits.

    `row_R`: each row's teacher; `target_R`: the draft token of the teacher's choice, -1 outside the draft vocabulary.
    """
    if logits_RD.device.type == "cuda" and logits_RD.dtype != torch.float64:
        from ray_eagle.training import kernels

        found: tuple[Tensor, Tensor] = kernels.row_losses(logits_RD, teacher_SD, row_R, target_R, weight_R, objective)
        return found
    losses, best = [], []
    step = max(1, CACHED // logits_RD.shape[1])
    for rows in (slice(first, first + step) for first in range(0, max(1, len(row_R)), step)):
        weight = None if weight_R is None else weight_R[rows]
        loss, choice = plain_row_losses(logits_RD[rows], teacher_SD, row_R[rows], target_R[rows], weight, objective)
        losses.append(loss)
        best.append(choice)
    return torch.cat(losses), torch.cat(best)


def plain_row_losses(
    logits_RD: Tensor,
    teacher_SD: Tensor,
    row_R: Tensor,
    target_R: Tensor,
    weight_R: Tensor | None,
    objective: Objective,
) -> tuple[Tensor, Tensor]:
    """`row_losses` in plain torch."""
    best_R = logits_RD.max(-1).indices  # several times faster than argmax on CPUs
    log_q = wide(logits_RD).log_softmax(-1)
    label_R1 = target_R.clamp(min=0)[:, None]
    if objective.labels == "soft":
        p = wide(teacher_SD[row_R]).softmax(-1)
        entropy_R = -torch.linalg.vecdot(p, log_q)
    else:
        p = torch.zeros_like(log_q).scatter_(1, label_R1, (target_R >= 0).to(log_q.dtype)[:, None])
        entropy_R = -log_q.gather(1, label_R1)[:, 0] * (target_R >= 0)
    if objective.kind == "soft-ce":
        if weight_R is not None:
            logits_RD.copy_(log_q.exp_().sub_(p).mul_(weight_R[:, None]))
        return entropy_R, best_R
    q = log_q.exp_()
    accepted_R = torch.minimum(p, q).sum(-1)
    share_R = (-objective.rate * accepted_R).exp() if objective.kind == "mix" else torch.zeros_like(accepted_R)
    if weight_R is not None:
        lower = q < p
        below_R1 = (q * lower).sum(-1, keepdim=True)
        gradient = share_R[:, None] * (q - p) + (1 - share_R)[:, None] * q * (below_R1 - lower.to(q.dtype))
        logits_RD.copy_(gradient * weight_R[:, None])
    return share_R * entropy_R + (1 - share_R) * (1 - accepted_R), best_R


def loss_weights(counts_K: Tensor, decay: float) -> Tensor:
    """[K]: what to multiply each step's summed losses with, so that the sum is the mean over the global batch.

    counts_K: positions that enter each step's loss, over all packs of the optimizer step. total = sum_k decay^k mean_k /
    sum_k decay^k; a step without positions adds nothing.
    """
    decays = decay ** torch.arange(len(counts_K), dtype=torch.float64, device=counts_K.device)
    return torch.where(counts_K > 0, decays / counts_K.clamp(min=1) / decays.sum(), 0.0)


def entering_counts(pack: Pack, t2d_V: Tensor) -> Tensor:
    """[K] int64: positions that enter each step's loss, known before the forward pass."""
    known_S = t2d_V[pack.top1_S]
    return torch.stack([known_S[step.teacher_M].sum() for step in pack.steps])
