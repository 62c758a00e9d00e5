"""The drafter's weights as a training step uses them: compute copies, made once per optimizer step, and the float32
buffers where their gradients gather over unroll steps and packs.

Projections that read the same input are one matrix here: those of the attention; gate and up. Gradients are added into the buffers by
the matrix products themselves, so no partial sum is ever rounded to 16 bits (those of 8-bit products once are).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ray_eagle.drafter.model import Drafter, LatentAttention
from ray_eagle.target.attention import flash_runs
from ray_eagle.training import fp8
from ray_eagle.training.heads import GroupedHeads, LatentHeads
from ray_eagle.training.pointwise import PLAIN, Pointwise

ROWS = 2048
"""Weight gradients of fewer rows wait for more: a product of few rows is as slow as its sum is large."""

ROWS_8_BITS = 4096
"""The same for 8-bit products, which are added to the sum in a pass of their own."""

WHOLE = slice(None)

PADDED_ROWS = 64
"""On CPUs rows come in multiples of this."""


class Matrix:
    """One matrix [out, in] of one or more parameters on top of each other."""

    def __init__(self, parameters: list[nn.Parameter], dtype: torch.dtype, eight_bits: bool = False) -> None:
        self.parameters, self.dtype, self.eight_bits = parameters, dtype, eight_bits
        self._enough = ROWS_8_BITS if eight_bits else ROWS
        masters = [parameter.detach() for parameter in parameters]
        self.value = torch.empty(0, dtype=dtype)
        """[out, in] in `dtype`; nothing when the products are in 8 bits."""
        self.copies: tuple[list[Tensor], list[Tensor]] = [], []
        """Parts of `value`, and the parameters that they are copies of."""
        if not eight_bits and len(masters) == 1 and masters[0].dtype == dtype:
            self.value = masters[0]
        elif not eight_bits:
            size = (sum(map(len, masters)), masters[0].shape[1])
            self.value = torch.empty(size, dtype=dtype, device=masters[0].device)
            self.copies = [*self.value.split([len(master) for master in masters])], masters
        self._quantised: fp8.Quantised | None = None
        self._gradient: Tensor | None = None
        self._parts: tuple[Tensor, ...] = ()
        self._empty = False
        self._waiting: list[tuple[slice, Gradient, Tensor]] = []

    def quantise(self) -> None:
        """Make the parameters' 8 bits again, after they changed."""
        masters = [parameter.detach().to(self.dtype) for parameter in self.parameters]
        if any(len(master) % fp8.MULTIPLE for master in masters[:-1]):
            masters = [torch.cat(masters)]  # rows are taken out of it again
        self._quantised = fp8.quantise(masters, fp8.FORWARD)

    def gather(self) -> None:
        """Let the parameters' `.grad` be parts of the gradient buffer, which starts at zero where there was none."""
        if self._gradient is None:
            first = self.parameters[0]
            kind = torch.promote_types(self.dtype, torch.float32)
            size = (sum(len(parameter) for parameter in self.parameters), first.shape[1])
            self._gradient = torch.empty(size, dtype=kind, device=first.device)
            self._parts = self._gradient.split([len(parameter) for parameter in self.parameters])
        self._empty = all(parameter.grad is None for parameter in self.parameters)
        for part, parameter in zip(self._parts, self.parameters, strict=True):
            if parameter.grad is None and not self._empty:
                part.zero_()
            elif parameter.grad is not None and parameter.grad.data_ptr() != part.data_ptr():
                part.copy_(parameter.grad)
            parameter.grad = part

    def settle(self) -> None:
        """Make the gradient buffer complete."""
        assert self._gradient is not None, "gather() comes first"
        waiting, self._waiting = self._waiting, []
        whole = [(gradient, x_NI) for rows, gradient, x_NI in waiting if rows == WHOLE]
        if whole:
            self._add(self._gradient, [gradient for gradient, _ in whole], [x_NI for _, x_NI in whole], self._empty)
        elif self._empty:
            self._gradient.zero_()
        self._empty = False
        for rows, gradient, x_NI in waiting:
            if rows != WHOLE:
                self._add(self._gradient[rows], [gradient], [x_NI], False)

    def product(self, x_NI: Tensor, rows: slice = WHOLE, add: Tensor | None = None) -> Tensor:
        """[N, out]: x times the rows of the matrix, transposed; `add` [N, out] is added before rounding."""
        if self._quantised is not None:
            x = fp8.quantise([x_NI], fp8.FORWARD, turned=False)
            out = fp8.product(x, self._quantised.rows(rows), x_NI.dtype, fast=True)
            return out if add is None else out.add_(add)
        weight, x = self.value if rows == WHOLE else self.value[rows], padded(x_NI)
        out = x @ weight.T if add is None else torch.addmm(padded(add), x, weight.T)
        return out if x is x_NI else out[: len(x_NI)]

    def incoming(self, grad_NO: Tensor) -> "Gradient":
        """The output's gradient, quantised once for both products where there are enough rows."""
        if self._quantised is None:
            return Gradient(grad_NO)
        return Gradient(grad_NO, fp8.quantise([grad_NO], fp8.BACKWARD, turned=len(grad_NO) >= self._enough))

    def backward(self, grad_NO: Tensor, x_NI: Tensor, rows: slice = WHOLE) -> Tensor:
        """Add the weight's gradient to the buffer, and return the input's [N, in]."""
        gradient = self.incoming(grad_NO)
        self.add_gradient(gradient, x_NI, rows)
        return self.input_gradient(gradient, rows)

    def input_gradient(self, gradient: "Gradient", rows: slice = WHOLE) -> Tensor:
        """[N, in]"""
        if gradient.quantised is None or self._quantised is None:
            grad = padded(gradient.value)
            out = grad @ (self.value if rows == WHOLE else self.value[rows])
            return out if grad is gradient.value else out[: len(gradient.value)]
        weight = self._quantised.transposed().columns(slice(*rows.indices(self._quantised.count)[:2]))
        return fp8.product(gradient.quantised, weight, gradient.value.dtype)

    def add_gradient(self, gradient: "Gradient", x_NI: Tensor, rows: slice = WHOLE) -> None:
        """Add grad^T x to the gradient buffer: now, or with others when there are few rows. Neither may change meanwhile."""
        if not x_NI.shape[0]:
            return
        self._waiting.append((rows, gradient, x_NI))
        if sum(x_NI.shape[0] for *_, x_NI in self._waiting) >= self._enough:
            self.settle()

    def _add(self, sum_OI: Tensor, gradients: list["Gradient"], xs: list[Tensor], empty: bool) -> None:
        values = [gradient.value for gradient in gradients]
        if self._quantised is None:
            add_product(sum_OI, padded(joined(values)).T, padded(joined(xs)), empty)
            return
        quantised = gradients[0].quantised
        if len(gradients) > 1 or quantised is None or not quantised.turned.numel():
            quantised = fp8.quantise(values, fp8.BACKWARD, values=False)
        x = fp8.quantise(xs, fp8.FORWARD, values=False)
        fp8.add_product(sum_OI, quantised.transposed(), x.transposed(), empty)


@dataclass(frozen=True)
class Gradient:
    """Of a product's output: `value` [N, out], and the same in 8 bits if it was made."""

    value: Tensor
    quantised: fp8.Quantised | None = None


class Vector:
    """A norm's weight: used as it is, its gradient added to `.grad`."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self.parameter = parameter

    @property
    def value(self) -> Tensor:
        return self.parameter.detach()

    def gather(self) -> None:
        if self.parameter.grad is None:
            self.parameter.grad = torch.zeros_like(self.parameter)

    def add(self, gradient: Tensor) -> None:
        assert self.parameter.grad is not None, "gather() comes first"
        self.parameter.grad += gradient


class Weights:
    """All of a drafter's weights in `dtype`; float32 (or float64) drafters stay the masters."""

    def __init__(
        self, drafter: Drafter, dtype: torch.dtype, *, eight_bits: bool = False, pointwise: Pointwise = PLAIN
    ) -> None:
        layer = drafter.midlayer
        attention, mlp, shape = layer.self_attn, layer.mlp, drafter.shape

        def matrix(*modules: nn.Linear) -> Matrix:
            return Matrix([module.weight for module in modules], dtype, eight_bits)

        self.drafter, self.dtype, self.pointwise = drafter, dtype, pointwise
        self.eps = shape.rms_norm_eps
        self.fc = matrix(drafter.fc)
        self.qkv = matrix(*attention.projections)
        self.query_rows = len(attention.projections[0].weight)
        self.heads: GroupedHeads | LatentHeads = GroupedHeads(shape, pointwise)
        if isinstance(attention, LatentAttention):
            flash = flash_runs(drafter.lm_head.weight.device, dtype, shape.head_dim)
            self.heads = LatentHeads(attention, matrix, Vector, pointwise, equal_widths=flash)
        self.o = matrix(attention.o_proj)
        self.gate_up = matrix(mlp.gate_proj, mlp.up_proj)
        self.down = matrix(mlp.down_proj)
        self.head = matrix(drafter.lm_head)
        self.embedding_norm = Vector(layer.input_layernorm.weight)
        self.hidden_norm = Vector(layer.hidden_norm.weight)
        self.middle_norm = Vector(layer.post_attention_layernorm.weight)
        self.final_norm = Vector(drafter.norm.weight)
        self.drafts_V = torch.full_like(drafter.t2d, -1, dtype=torch.int64)
        """[V] int64: the draft token of each target token, -1 for none."""
        self.drafts_V[drafter.target_ids] = torch.arange(shape.draft_vocab_size, device=drafter.d2t.device)
        self._rotary = self._cos_sin(0)
        self.matrices = [v for v in vars(self).values() if isinstance(v, Matrix)] + [*self.heads.matrices]
        self.vectors = [v for v in vars(self).values() if isinstance(v, Vector)] + [*self.heads.vectors]
        self.refresh()

    def rotary(self, positions: int) -> tuple[Tensor, Tensor]:
        """cos and sin [P, E/2] of at least so many positions, wide; computed again only for longer documents."""
        if len(self._rotary[0]) < positions:
            self._rotary = self._cos_sin(1 << (positions - 1).bit_length())
        return self._rotary

    def _cos_sin(self, positions: int) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(self.dtype, torch.float32)
        return self.drafter.rotary(torch.arange(positions, device=self.drafter.d2t.device), wide)

    def refresh(self) -> None:
        """After an optimizer step."""
        with torch.no_grad():
            copies, masters = ([x for matrix in self.matrices for x in matrix.copies[i]] for i in (0, 1))
            if copies:
                torch._foreach_copy_(copies, masters)
            for matrix in self.matrices:
                if matrix.eight_bits:
                    matrix.quantise()

    def gather(self) -> None:
        """Before a backward pass: every parameter has a `.grad` to add to."""
        for matrix in self.matrices:
            matrix.gather()
        for vector in self.vectors:
            vector.gather()

    def settle(self) -> None:
        """After it: the gradients are complete."""
        for matrix in self.matrices:
            matrix.settle()


def add_product(sum_MN: Tensor, a_MK: Tensor, b_KN: Tensor, empty: bool = False) -> None:
    """sum += a @ b (sum = a @ b where it is still `empty`), the sum in float32 also where a and b have 16 bits."""
    if a_MK.dtype == sum_MN.dtype:
        torch.mm(a_MK, b_KN, out=sum_MN) if empty else torch.addmm(sum_MN, a_MK, b_KN, out=sum_MN)
    elif sum_MN.device.type == "cuda":
        kind = {"out_dtype": sum_MN.dtype, "out": sum_MN}
        torch.mm(a_MK, b_KN, **kind) if empty else torch.addmm(sum_MN, a_MK, b_KN, **kind)
    elif empty:
        sum_MN.copy_(a_MK @ b_KN)
    else:
        sum_MN += a_MK @ b_KN


def wide_product(a_MK: Tensor, b_KN: Tensor) -> Tensor:
    """a @ b, on GPUs not rounded to 16 bits."""
    halves = a_MK.dtype in (torch.bfloat16, torch.float16)
    if halves and a_MK.is_cuda:
        return torch.mm(a_MK, b_KN, out_dtype=torch.float32)
    return (padded(a_MK) @ b_KN)[: len(a_MK)]


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """One tensor of at least one; a single one is not copied."""
    return tensors[0] if len(tensors) == 1 else torch.cat([*tensors])


def padded(x_NI: Tensor) -> Tensor:
    """With rows of zeros on CPUs in 16 bits, where products of each new number of rows first compile for milliseconds.

    At most an eighth more rows (or 63), so that whatever the packs are, there are few numbers.
    """
    if x_NI.device.type != "cpu" or x_NI.dtype not in (torch.bfloat16, torch.float16):
        return x_NI
    unit = max(PADDED_ROWS, 1 << max(0, len(x_NI).bit_length() - 4))
    more = -len(x_NI) % unit
    return torch.cat([x_NI, x_NI.new_zeros(more, x_NI.shape[1])]) if more else x_NI
