"""Attention of an unroll step: the step-0 keys of the document up to t, and the position's own keys of steps 1..k, in one softmax.

The step-0 part runs over query slots (`Spans`), causal inside each document, and yields its output and log-sum-exp; the
few own keys are merged in through that log-sum-exp. Backward, the step-0 part is differentiated with the *merged* output and
log-sum-exp, which makes its probabilities those of the one softmax; the own keys' gradients are written out.

On GPUs in 16 bits the step-0 part is PyTorch's flash kernel and the merge a Triton kernel; elsewhere both are plain torch.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ray_eagle.target.attention import flash_runs
from ray_eagle.training.packing import Spans, StepIndex
from ray_eagle.training.pointwise import wide


@dataclass(frozen=True)
class Keys:
    """Keys and values that queries of one pack see, or their gradients.

    Values may be narrower than keys, in plain torch; then outputs are too.
    """

    keys_TGE: Tensor
    """Step 0: of every token."""
    values_TGE: Tensor
    own_keys_KNGE: Tensor
    """Steps 1 .. K-1, at the rows of step 0's positions. Rows that a step does not compute are never read."""
    own_values_KNGE: Tensor


def attend(
    queries_NAE: Tensor, seen: Keys, own: int, index: StepIndex, spans: Spans, scale: float
) -> tuple[Tensor, Tensor]:
    """Output [N, A, E] and log-sum-exp [N, A] (wide) of queries over step 0 and the first `own` later steps."""
    flash = flash_runs(queries_NAE.device, queries_NAE.dtype, queries_NAE.shape[-1])
    forward = flash_forward if flash else plain_forward
    queries_QAE = _to_slots(queries_NAE, index, spans)
    output_QAE, lse_AQ = forward(queries_QAE, seen.keys_TGE, seen.values_TGE, spans, scale)
    if flash:
        from ray_eagle.training import kernels

        return kernels.merge(queries_NAE, output_QAE, lse_AQ, seen, own, index, scale)
    output_NAE, lse_NA = output_QAE[index.slot_N], lse_AQ.T[index.slot_N]
    return merge(queries_NAE, output_NAE, lse_NA, seen, own, index.first_N, scale)


def attend_backward(
    grad_NAE: Tensor,
    queries_NAE: Tensor,
    output_NAE: Tensor,
    lse_NA: Tensor,
    seen: Keys,
    gradients: Keys,
    own: int,
    index: StepIndex,
    spans: Spans,
    scale: float,
) -> Tensor:
    """The queries' gradient [N, A, E]; those of keys and values are added to `gradients`."""
    flash = flash_runs(queries_NAE.device, queries_NAE.dtype, queries_NAE.shape[-1])
    backward = flash_backward if flash else plain_backward
    grad_QAE, queries_QAE, output_QAE = (_to_slots(x, index, spans) for x in (grad_NAE, queries_NAE, output_NAE))
    lse_AQ = _to_slots(lse_NA, index, spans).T.contiguous()
    found = backward(grad_QAE, queries_QAE, seen.keys_TGE, seen.values_TGE, output_QAE, lse_AQ, spans, scale)
    gradients.keys_TGE.add_(found[1])
    gradients.values_TGE.add_(found[2])
    if flash:
        from ray_eagle.training import kernels

        return kernels.merge_backward(
            grad_NAE, queries_NAE, output_NAE, lse_NA, found[0], seen, gradients, own, index, scale
        )
    return found[0][index.slot_N] + merge_backward(
        grad_NAE, queries_NAE, output_NAE, lse_NA, seen, gradients, own, index.first_N, scale
    )


def merge(
    queries_NAE: Tensor, output_NAE: Tensor, lse_NA: Tensor, seen: Keys, own: int, first_N: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of one softmax over what (output, lse) saw and the own keys."""
    if not own:
        return output_NAE, lse_NA
    grouped = wide(queries_NAE).unflatten(1, (seen.keys_TGE.shape[1], -1))  # [N, G, A/G, E]
    scores = [lse_NA]
    for i in range(own):
        keys_NG1E = wide(seen.own_keys_KNGE[i, first_N]).unsqueeze(2)
        scores.append((grouped * keys_NG1E).sum(-1).flatten(1) * scale)
    merged_NA = torch.stack(scores).logsumexp(0)
    weights = [(score - merged_NA).exp().unflatten(1, grouped.shape[1:3]).unsqueeze(-1) for score in scores]
    output = wide(output_NAE).unflatten(1, grouped.shape[1:3]) * weights[0]
    for i in range(own):
        output = output + weights[1 + i] * wide(seen.own_values_KNGE[i, first_N]).unsqueeze(2)
    return output.flatten(1, 2).to(output_NAE.dtype), merged_NA


def merge_backward(
    grad_NAE: Tensor,
    queries_NAE: Tensor,
    output_NAE: Tensor,
    lse_NA: Tensor,
    seen: Keys,
    gradients: Keys,
    own: int,
    first_N: Tensor,
    scale: float,
) -> Tensor:
    """The part of the queries' gradient that comes through the own keys; their own gradients are added to `gradients`."""
    shape = (seen.keys_TGE.shape[1], -1)
    grad, queries = (wide(x).unflatten(1, shape) for x in (grad_NAE, queries_NAE))
    delta = (grad * wide(output_NAE).unflatten(1, shape)).sum(-1, keepdim=True)
    lse = lse_NA.unflatten(1, shape).unsqueeze(-1)
    grad_queries = torch.zeros_like(queries)
    for i in range(own):
        keys, values = (wide(x[i, first_N]).unsqueeze(2) for x in (seen.own_keys_KNGE, seen.own_values_KNGE))
        weight = ((queries * keys).sum(-1, keepdim=True) * scale - lse).exp()
        grad_scores = weight * ((grad * values).sum(-1, keepdim=True) - delta) * scale
        grad_queries = grad_queries + grad_scores * keys
        for kept, new in (
            (gradients.own_keys_KNGE, grad_scores * queries),
            (gradients.own_values_KNGE, weight * grad),
        ):
            kept[i, first_N] = kept[i, first_N] + new.sum(2).to(kept.dtype)
    return grad_queries.flatten(1, 2).to(queries_NAE.dtype)


def plain_forward(
    queries_QAE: Tensor, keys_TGE: Tensor, values_TGE: Tensor, spans: Spans, scale: float
) -> tuple[Tensor, Tensor]:
    """Output [Q, A, E] and log-sum-exp [A, Q] of causal attention inside each document, its last slot at its last key."""
    outputs, sums = [], []
    for q0, q1, k0, k1 in spans.bounds:
        if q1 > q0:
            q, k, v = _grouped(queries_QAE[q0:q1], keys_TGE[k0:k1], values_TGE[k0:k1])
            scores = _scores(q, k, scale, q1 - q0)
            lse = scores.logsumexp(-1)
            out = (scores - lse.unsqueeze(-1)).exp_().flatten(1, 2) @ v
            outputs.append(_ungrouped(out, q1 - q0).to(queries_QAE.dtype))
            sums.append(lse.flatten(0, 1))
    if not outputs:
        return queries_QAE.new_zeros(0, queries_QAE.shape[1], values_TGE.shape[2]), wide(
            queries_QAE.new_zeros(queries_QAE.shape[1], 0)
        )
    return torch.cat(outputs), torch.cat(sums, dim=1)


def plain_backward(
    grad_QAE: Tensor,
    queries_QAE: Tensor,
    keys_TGE: Tensor,
    values_TGE: Tensor,
    output_QAE: Tensor,
    lse_AQ: Tensor,
    spans: Spans,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values, where (output, lse) may belong to a softmax over more keys than these."""
    grad_queries, grad_keys, grad_values = (torch.zeros_like(x) for x in (queries_QAE, keys_TGE, values_TGE))
    delta_QA = (wide(grad_QAE) * wide(output_QAE)).sum(-1)
    groups = keys_TGE.shape[1]
    for q0, q1, k0, k1 in spans.bounds:
        if q1 == q0:
            continue
        q, k, v = _grouped(queries_QAE[q0:q1], keys_TGE[k0:k1], values_TGE[k0:k1])
        grad = _grouped(grad_QAE[q0:q1], keys_TGE[k0:k1], values_TGE[k0:k1])[0]
        lse, delta = (x.T[q0:q1].T.unflatten(0, (groups, -1)).unsqueeze(-1) for x in (lse_AQ, delta_QA.T))
        weights = (_scores(q, k, scale, q1 - q0) - lse).exp_()
        grad_weights = (grad @ v.transpose(1, 2)).view_as(weights)
        grad_scores = grad_weights.sub_(delta).mul_(weights).mul_(scale).flatten(1, 2)
        grad_queries[q0:q1] = _ungrouped(grad_scores @ k, q1 - q0)
        grad_keys[k0:k1] = (grad_scores.transpose(1, 2) @ q).transpose(0, 1)
        grad_values[k0:k1] = (weights.flatten(1, 2).transpose(1, 2) @ grad).transpose(0, 1)
    return grad_queries, grad_keys, grad_values


def flash_forward(
    queries_QAE: Tensor, keys_TGE: Tensor, values_TGE: Tensor, spans: Spans, scale: float
) -> tuple[Tensor, Tensor]:
    """`plain_forward` as one kernel."""
    if not len(queries_QAE):
        return torch.empty_like(queries_QAE), queries_QAE.new_zeros(queries_QAE.shape[1], 0, dtype=torch.float32)
    bounds = (spans.queries_B1, spans.keys_B1, spans.longest_queries, spans.longest_keys)
    found = torch.ops.aten._flash_attention_forward(
        queries_QAE, keys_TGE, values_TGE, *bounds, 0.0, True, False, scale=scale
    )
    return found[0], found[1]


def flash_backward(
    grad_QAE: Tensor,
    queries_QAE: Tensor,
    keys_TGE: Tensor,
    values_TGE: Tensor,
    output_QAE: Tensor,
    lse_AQ: Tensor,
    spans: Spans,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """`plain_backward` as one kernel."""
    if not len(queries_QAE):
        return torch.empty_like(queries_QAE), torch.zeros_like(keys_TGE), torch.zeros_like(values_TGE)
    bounds = (spans.queries_B1, spans.keys_B1, spans.longest_queries, spans.longest_keys)
    random = torch.empty(2, dtype=torch.uint64, device=grad_QAE.device)  # of dropout, which there is none of
    found: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
        grad_QAE, queries_QAE, keys_TGE, values_TGE, output_QAE, lse_AQ, *bounds, 0.0, True,
        random, grad_QAE.new_empty(0), scale=scale,
    )  # fmt: skip
    return found


def _to_slots(x_N: Tensor, index: StepIndex, spans: Spans) -> Tensor:
    """[N, ..] -> [Q, ..], zeros in slots without a position: a zero output gradient makes all others there zero."""
    if len(x_N) == spans.slots:
        return x_N.contiguous()
    return x_N.new_zeros(spans.slots, *x_N.shape[1:]).index_copy_(0, index.slot_N, x_N)


def _grouped(q_QAE: Tensor, k_TGE: Tensor, v_TGE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[G, A/G * Q, E], [G, T, E], [G, T, E], wide: queries that share keys are rows of one product.

    Wide on CPUs is also faster: their 16-bit products compile anew for each pair of lengths.
    """
    groups = k_TGE.shape[1]
    q = wide(q_QAE).unflatten(1, (groups, -1)).permute(1, 2, 0, 3).flatten(1, 2)
    return q, wide(k_TGE).transpose(0, 1), wide(v_TGE).transpose(0, 1)


def _ungrouped(x: Tensor, queries: int) -> Tensor:
    """[G, A/G * Q, E] -> [Q, A, E]."""
    return x.unflatten(1, (-1, queries)).permute(2, 0, 1, 3).flatten(1, 2)


def _scores(q: Tensor, k: Tensor, scale: float, queries: int) -> Tensor:
    """[G, A/G, Q, T], wide, -inf where a key comes after the query."""
    scores = (q @ k.transpose(1, 2)).mul_(scale).unflatten(1, (-1, queries))
    keys = k.shape[1]
    hidden_QT = torch.ones(queries, keys, dtype=torch.bool, device=q.device).triu_(keys - queries + 1)
    return scores.masked_fill_(hidden_QT, float("-inf"))
