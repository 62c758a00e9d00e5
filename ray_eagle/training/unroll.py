"""EAGLE-3's training-time test: unroll the drafter K steps over ground-truth tokens, and score it against the target.

At step k, position t reads token t+1+k and its own output of step k-1 (the fused aux states at step 0), sits at RoPE
position t+k, and attends to the step-0 keys of its document up to t and to its own keys of steps 1..k, in one softmax.
The target's distribution at t+1+k, restricted to the draft vocabulary, teaches it token t+2+k.
Later-step keys touch only their own position: they are merged with the step-0 attention through its log-sum-exp.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ray_eagle.drafter.model import Drafter
from ray_eagle.training.packing import Pack, StepIndex


@dataclass(frozen=True)
class StepScores:
    """What one unroll step says about its N positions."""

    at_N: Tensor
    """[N] int64 index in the pack."""
    losses_N: Tensor
    """[N] soft cross-entropy, float32 or wider; only rows with `enters_N` are part of the loss."""
    enters_N: Tensor
    """[N] bool: the teacher's choice lies in the draft vocabulary."""
    right_N: Tensor
    """[N] bool: the drafter's choice is the teacher's (never so outside the draft vocabulary)."""


def unroll(drafter: Drafter, pack: Pack, embedding_VH: Tensor) -> Iterator[Tensor]:
    """Draft logits [N_k, D] of each step k at the positions `pack.steps[k].at_N`, with gradients."""
    hidden_NH = drafter.project(pack.aux_TC)
    keys_BTGE = values_BTGE = None
    own_keys: list[Tensor] = []
    own_values: list[Tensor] = []
    for k, step in enumerate(pack.steps):
        # Step 0 needs the keys and values of every token, but queries only where positions count.
        rows_T = torch.arange(len(pack.tokens_T), device=step.at_N.device) if k == 0 else step.at_N
        if k:
            hidden_NH = hidden_NH[step.kept_N]
            own_keys = [key[step.kept_N] for key in own_keys]
            own_values = [value[step.kept_N] for value in own_values]
        # The token after the pack's last is never attended to by a position that counts: any will do.
        following_T = (rows_T + 1 + k).clamp(max=len(pack.tokens_T) - 1)
        embedded = F.embedding(pack.tokens_T[following_T], embedding_VH)
        inputs = drafter.attention_input(hidden_NH, embedded.to(hidden_NH.dtype))
        keys, values = drafter.keys_values(inputs, pack.positions_T[rows_T] + k)
        if k == 0:
            keys_BTGE, values_BTGE = _grid(keys, pack), _grid(values, pack)
            inputs, hidden_NH = inputs[step.at_N], hidden_NH[step.at_N]
        else:
            own_keys.append(keys)
            own_values.append(values)
        queries_NAE = drafter.queries(inputs, pack.positions_T[step.at_N] + k)
        attended_NAE = attend(queries_NAE, keys_BTGE, values_BTGE, step, own_keys, own_values)
        hidden_NH = drafter.finish(hidden_NH, attended_NAE.to(hidden_NH.dtype))
        yield drafter.logits(hidden_NH)


def attend(
    queries_NAE: Tensor,
    keys_BTGE: Tensor,
    values_BTGE: Tensor,
    step: StepIndex,
    own_keys: list[Tensor],
    own_values: list[Tensor],
) -> Tensor:
    """[N, A, E]: one softmax over the document's step-0 keys up to t and the position's own later keys ([N, G, E] each)."""
    heads, width = queries_NAE.shape[1:]
    documents, _, groups, _ = keys_BTGE.shape
    scaled_NAE = queries_NAE * width**-0.5
    grid = scaled_NAE.new_zeros(documents * step.width, heads, width).index_copy(0, step.slot_N, scaled_NAE)
    # [B, G, heads per group * N, E] against [B, G, E, T]: queries that share keys are rows of one product.
    q = grid.view(documents, step.width, groups, heads // groups, width).permute(0, 2, 3, 1, 4).flatten(2, 3)
    scores = (q @ keys_BTGE.permute(0, 2, 3, 1)).unflatten(2, (heads // groups, step.width))
    scores = _wide(scores).masked_fill(~step.causal_BNT[:, None, None], float("-inf"))
    lse = scores.logsumexp(-1, keepdim=True)
    weights = (scores - lse).exp().to(values_BTGE.dtype).flatten(2, 3)
    seen = (weights @ values_BTGE.permute(0, 2, 1, 3)).unflatten(2, (heads // groups, step.width))
    seen_NAE = seen.permute(0, 3, 1, 2, 4).reshape(-1, heads, width)[step.slot_N]
    if not own_keys:
        return seen_NAE
    lse_NA = lse.permute(0, 3, 1, 2, 4).reshape(-1, heads)[step.slot_N]
    own = [(scaled_NAE * key.repeat_interleave(heads // groups, dim=1)).sum(-1) for key in own_keys]
    parts_NAK = torch.stack([lse_NA, *map(_wide, own)], dim=-1).softmax(-1)
    merged = seen_NAE * parts_NAK[..., :1]
    for i, value in enumerate(own_values, 1):
        merged = merged + parts_NAK[..., i : i + 1] * value.repeat_interleave(heads // groups, dim=1)
    return merged


def score_steps(drafter: Drafter, pack: Pack, embedding_VH: Tensor, draft_head_DH: Tensor) -> Iterator[StepScores]:
    """Losses and right choices of each step. `draft_head_DH`: the target's head rows of the draft vocabulary."""
    with torch.no_grad():
        teacher_SD = _wide(pack.last_SH @ draft_head_DH.T).softmax(-1)
        known_S = drafter.t2d[pack.top1_S]
        target_ids_D = drafter.target_ids
    for k, logits_ND in enumerate(unroll(drafter, pack, embedding_VH)):
        at_N = pack.steps[k].at_N
        row_N = pack.teacher_row_T[at_N + 1 + k]
        losses_N = F.cross_entropy(_wide(logits_ND), teacher_SD[row_N], reduction="none")
        right_N = target_ids_D[logits_ND.detach().argmax(-1)] == pack.top1_S[row_N]
        yield StepScores(at_N, losses_N, known_S[row_N], right_N)


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
    return torch.stack([known_S[pack.teacher_row_T[s.at_N + 1 + k]].sum() for k, s in enumerate(pack.steps)])


def _grid(x_TGE: Tensor, pack: Pack) -> Tensor:
    """[T, G, E] -> [documents, longest, G, E], zeros where a document is shorter."""
    grid = x_TGE.new_zeros(pack.documents * pack.longest, *x_TGE.shape[1:]).index_copy(0, pack.key_slot_T, x_TGE)
    return grid.view(pack.documents, pack.longest, *x_TGE.shape[1:])


def _wide(x: Tensor) -> Tensor:
    """float32, or float64 as it is: softmax and losses are never taken in 16 bits."""
    return x if x.dtype == torch.float64 else x.float()
