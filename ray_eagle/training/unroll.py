"""EAGLE-3's training-time test: unroll the drafter K steps over ground-truth tokens, and score it against the target.

At step k, position t reads token t+1+k and its own output of step k-1 (the fused aux states at step 0), sits at RoPE
position t+k, and attends to the step-0 keys of its document up to t and to its own keys of steps 1..k, in one softmax.
The target's distribution at t+1+k, restricted to the draft vocabulary, teaches it token t+2+k.

The backward pass is written out instead of left to autograd: norms, rotations and gates are computed again, a step's
activations are freed as soon as they are used, and the weights' gradients are added in float32 by the products themselves.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ray_eagle.training.attention import Keys, attend, attend_backward
from ray_eagle.training.heads import Rotary
from ray_eagle.training.losses import Objective, StepScores, head_and_loss
from ray_eagle.training.packing import Pack
from ray_eagle.training.weights import Weights


@dataclass(frozen=True)
class _Kept:
    """What the backward pass needs of one step, besides the outputs."""

    queries_NAE: Tensor
    attended_NAE: Tensor
    lse_NA: Tensor
    middle_NH: Tensor
    """The residual stream between attention and MLP."""
    gate_up_N2: Tensor
    rotary: Rotary
    products: tuple[Tensor | None, Tensor | None]
    """Of the attention's first matrix: for the queries, and for keys and values; None where nobody needs them."""


class Unroll:
    """The forward pass of one pack: `outputs` [N, H], un-normed, of each step; `backward` may follow once."""

    @torch.no_grad()
    def __init__(self, weights: Weights, pack: Pack, embedding_VH: Tensor, *, keep: bool = True) -> None:
        """`keep`: what `backward` needs. States and embedding must be in the weights' dtype, on their device."""
        self.weights, self.pack, self.embedding_VH = weights, pack, embedding_VH
        self.scale = weights.drafter.shape.softmax_scale
        self.cos_PE, self.sin_PE = weights.rotary(pack.spans.longest_keys + len(pack.steps))
        self.rotary_T = self._rotary(pack.positions_T)
        # what position t reads at step 0; the one after a pack's last is attended to by none that counts: any will do
        self.next_T = torch.cat([pack.tokens_T[1:], pack.tokens_T[-1:]])
        self.hidden_TH = weights.fc.product(pack.aux_TC)
        self.outputs: list[Tensor] = []
        self.kept: list[_Kept] = []
        self.seen = self._step_0_keys()
        for k in range(len(pack.steps)):
            kept = self._forward(k)
            if keep:
                self.kept.append(kept)

    def _step_0_keys(self) -> Keys:
        w, steps = self.weights, self.pack.steps
        input_T2 = w.pointwise.join(
            self._embedded(0), self.hidden_TH, w.embedding_norm.value, w.hidden_norm.value, w.eps
        )
        product_TK = w.qkv.product(input_T2, slice(w.query_rows, None))
        product_NQ = w.qkv.product(_rows(input_T2, steps[0].at_N), slice(0, w.query_rows))
        self._step_0_products = product_NQ, product_TK if w.heads.keeps_products else None
        keys_TGE, values_TGE = w.heads.keys_values(product_TK, self.rotary_T)
        own = [x.new_empty(len(steps) - 1, len(steps[0].at_N), *x.shape[1:]) for x in (keys_TGE, values_TGE)]
        return Keys(keys_TGE, values_TGE, *own)

    def _embedded(self, k: int) -> Tensor:
        """Token t+1+k of each position, everywhere at step 0."""
        return F.embedding(self.pack.steps[k].token_N if k else self.next_T, self.embedding_VH)

    def _rotary(self, positions_N: Tensor) -> Rotary:
        return self.cos_PE.index_select(0, positions_N), self.sin_PE.index_select(0, positions_N)

    def _input(self, k: int) -> tuple[Tensor, Tensor]:
        """Hidden input and embedding [N, H] of step k > 0."""
        return _rows(self.outputs[k - 1], self.pack.steps[k].kept_N), self._embedded(k)

    def _forward(self, k: int) -> _Kept:
        w, index = self.weights, self.pack.steps[k]
        rotary = self._rotary(index.position_N)
        product_NK: Tensor | None
        if k:
            hidden_NH, embedded_NH = self._input(k)
            joined = w.pointwise.join(embedded_NH, hidden_NH, w.embedding_norm.value, w.hidden_norm.value, w.eps)
            product_NQ, product_NK = w.qkv.product(joined).tensor_split([w.query_rows], dim=1)
            keys_NGE, values_NGE = w.heads.keys_values(product_NK, rotary)
            self.seen.own_keys_KNGE[k - 1].index_copy_(0, index.first_N, keys_NGE)
            self.seen.own_values_KNGE[k - 1].index_copy_(0, index.first_N, values_NGE)
        else:
            hidden_NH = _rows(self.hidden_TH, index.at_N)
            product_NQ, product_NK = self._step_0_products
            del self._step_0_products
        queries_NAE = w.heads.queries(product_NQ, rotary)
        products = (product_NQ, product_NK) if w.heads.keeps_products else (None, None)
        del product_NQ, product_NK
        attended_NAE, lse_NA = attend(queries_NAE, self.seen, k, index, self.pack.spans, self.scale)
        middle_NH = w.o.product(w.heads.join(attended_NAE), add=hidden_NH)
        gate_up_N2 = w.gate_up.product(w.pointwise.norm(middle_NH, w.middle_norm.value, w.eps))
        self.outputs.append(w.down.product(w.pointwise.gate(gate_up_N2), add=middle_NH))
        return _Kept(queries_NAE, attended_NAE, lse_NA, middle_NH, gate_up_N2, rotary, products)

    @torch.no_grad()
    def backward(self, gradients: list[Tensor]) -> None:
        """Add to the weights' gradients, given the outputs' gradients (which are overwritten)."""
        seen, steps = self.seen, self.pack.steps
        sums = torch.promote_types(self.weights.dtype, torch.float32)
        changes = Keys(
            torch.zeros_like(seen.keys_TGE, dtype=sums),
            torch.zeros_like(seen.values_TGE, dtype=sums),
            torch.zeros_like(seen.own_keys_KNGE),
            torch.zeros_like(seen.own_values_KNGE),
        )
        for k in reversed(range(len(steps))):
            hidden_NH = self._backward(k, gradients.pop(), changes)
            if k:
                _add_rows(gradients[-1], steps[k].kept_N, hidden_NH)

    def _backward(self, k: int, grad_NH: Tensor, changes: Keys) -> Tensor:
        """The gradient of step k's hidden input at its positions (k > 0)."""
        w, index, kept = self.weights, self.pack.steps[k], self.kept.pop()
        self.outputs.pop()
        down = w.down.incoming(grad_NH)
        gated_NI, grad_N2 = w.pointwise.gate_backward(w.down.input_gradient(down), kept.gate_up_N2)
        w.down.add_gradient(down, gated_NI)
        del gated_NI, down
        normed_NH = w.pointwise.norm(kept.middle_NH, w.middle_norm.value, w.eps)
        grad_normed_NH = w.gate_up.backward(grad_N2, normed_NH)
        grad_NH, grad_H = w.pointwise.norm_backward_add(
            grad_normed_NH, kept.middle_NH, w.middle_norm.value, w.eps, grad_NH
        )
        w.middle_norm.add(grad_H)
        del grad_N2, normed_NH, grad_normed_NH
        grad_attended = w.heads.split(w.o.backward(grad_NH, w.heads.join(kept.attended_NAE)))
        grad_queries = attend_backward(
            grad_attended, kept.queries_NAE, kept.attended_NAE, kept.lse_NA, self.seen, changes, k, index,
            self.pack.spans, self.scale,
        )  # fmt: skip
        product_NQ, product_NK = kept.products
        grad_NQ = w.heads.queries_backward(grad_queries, product_NQ, kept.rotary)
        if not k:
            self._first_backward(grad_NH, grad_NQ, product_NK, changes)
            return grad_NH
        keys_NGE, values_NGE = (x[k - 1, index.first_N] for x in (changes.own_keys_KNGE, changes.own_values_KNGE))
        grad_NK = w.heads.keys_values_backward(keys_NGE, values_NGE, product_NK, kept.rotary)
        hidden_NH, embedded_NH = self._input(k)
        joined = w.pointwise.join(embedded_NH, hidden_NH, w.embedding_norm.value, w.hidden_norm.value, w.eps)
        grad_N2 = w.qkv.backward(torch.cat([grad_NQ, grad_NK], dim=1), joined)
        return grad_NH + self._join_backward(grad_N2, embedded_NH, hidden_NH)

    def _first_backward(self, grad_NH: Tensor, grad_NQ: Tensor, product_TK: Tensor | None, changes: Keys) -> None:
        """Step 0 below the attention: queries at its positions, keys and values everywhere, the projection."""
        w, at_N = self.weights, self.pack.steps[0].at_N
        embedded_TH = self._embedded(0)
        joined = w.pointwise.join(embedded_TH, self.hidden_TH, w.embedding_norm.value, w.hidden_norm.value, w.eps)
        keys_TGE, values_TGE = (x.to(w.dtype) for x in (changes.keys_TGE, changes.values_TGE))
        grad_TK = w.heads.keys_values_backward(keys_TGE, values_TGE, product_TK, self.rotary_T)
        grad_T2 = w.qkv.backward(grad_TK, joined, slice(w.query_rows, None))
        _add_rows(grad_T2, at_N, w.qkv.backward(grad_NQ, _rows(joined, at_N), slice(0, w.query_rows)))
        grad_TH = self._join_backward(grad_T2, embedded_TH, self.hidden_TH)
        _add_rows(grad_TH, at_N, grad_NH)
        w.fc.add_gradient(w.fc.incoming(grad_TH), self.pack.aux_TC)

    def _join_backward(self, grad_N2: Tensor, embedded_NH: Tensor, hidden_NH: Tensor) -> Tensor:
        w = self.weights
        found: tuple[Tensor, Tensor, Tensor] = w.pointwise.join_backward(
            grad_N2, embedded_NH, hidden_NH, w.hidden_norm.value, w.eps
        )
        w.embedding_norm.add(found[1])
        w.hidden_norm.add(found[2])
        return found[0]


@torch.no_grad()
def score_steps(
    weights: Weights, pack: Pack, embedding_VH: Tensor, draft_head_DH: Tensor, objective: Objective | None = None
) -> list[StepScores]:
    """Losses and right choices of each step. `draft_head_DH`: the target's head rows of the draft vocabulary."""
    outputs = Unroll(weights, pack, embedding_VH, keep=False).outputs
    return head_and_loss(weights, outputs, pack, draft_head_DH, objective or Objective())[0]


@torch.no_grad()
def train_pack(
    weights: Weights,
    pack: Pack,
    embedding_VH: Tensor,
    draft_head_DH: Tensor,
    weights_K: Tensor,
    objective: Objective | None = None,
) -> list[StepScores]:
    """Forward and backward pass of one pack: adds the gradient of sum_k weights_k * (losses of step k) to `.grad`."""
    weights.gather()
    unroll = Unroll(weights, pack, embedding_VH)
    scores, gradients = head_and_loss(weights, unroll.outputs, pack, draft_head_DH, objective or Objective(), weights_K)
    unroll.backward(gradients)
    weights.settle()
    return scores


def _rows(x: Tensor, rows_N: Tensor) -> Tensor:
    """x[rows], ascending and without repeats: x itself where that is all of it."""
    return x if rows_N.shape[0] == x.shape[0] else x.index_select(0, rows_N)


def _add_rows(x: Tensor, rows_N: Tensor, more_N: Tensor) -> None:
    """x[rows] += more, where no row comes twice."""
    if rows_N.shape[0] == x.shape[0]:
        x += more_N
    else:
        x.index_copy_(0, rows_N, x.index_select(0, rows_N) + more_N)
