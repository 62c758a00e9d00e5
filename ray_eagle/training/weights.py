"""The drafter's weights as a training step uses them: compute copies, made once per optimizer step, and the float32
buffers where their gradients gather over unroll steps and packs.

Projections that read the same input are one matrix here: q, k and v; gate and up. Gradients are added into the buffers by
the matrix products themselves, so no partial sum is ever rounded to 16 bits.
"""

import torch
from torch import Tensor, nn

from ray_eagle.drafter.model import Drafter
from ray_eagle.training import fp8
from ray_eagle.training.pointwise import PLAIN, Pointwise

ROWS = 2048
"""Weight gradients of fewer rows wait for more: a product of few rows is as slow as its sum is large."""


class Matrix:
    """One matrix [out, in] of one or more parameters on top of each other."""

    def __init__(self, parameters: list[nn.Parameter], dtype: torch.dtype, eight_bits: bool = False) -> None:
        self.parameters, self.eight_bits = parameters, eight_bits
        first = parameters[0]
        self._shared = len(parameters) == 1 and first.dtype == dtype
        shape = (sum(len(p) for p in parameters), first.shape[1])
        self.value = first.detach() if self._shared else torch.empty(shape, dtype=dtype, device=first.device)
        self._quantised: fp8.Quantised | None = None
        self._gradient: Tensor | None = None
        self._empty = False
        self._waiting: list[tuple[slice, Tensor, Tensor]] = []
        self.refresh()

    def refresh(self) -> None:
        """Copy the parameters again, after they changed."""
        if not self._shared:
            parts = self.value.split([len(p) for p in self.parameters])
            for part, parameter in zip(parts, self.parameters, strict=True):
                part.copy_(parameter.detach())
        if self.eight_bits:
            self._quantised = fp8.quantise(self.value, fp8.FORWARD)
            self._turned = self._quantised.transposed()

    def gather(self) -> None:
        """Let the parameters' `.grad` be parts of the gradient buffer, which starts at zero where there was none."""
        if self._gradient is None:
            kind = torch.promote_types(self.value.dtype, torch.float32)
            self._gradient = torch.empty(self.value.shape, dtype=kind, device=self.value.device)
        self._empty = all(parameter.grad is None for parameter in self.parameters)
        parts = self._gradient.split([len(p) for p in self.parameters])
        for part, parameter in zip(parts, self.parameters, strict=True):
            if parameter.grad is None and not self._empty:
                part.zero_()
            elif parameter.grad is not None and parameter.grad.data_ptr() != part.data_ptr():
                part.copy_(parameter.grad)
            parameter.grad = part

    def settle(self) -> None:
        """Make the gradient buffer complete."""
        assert self._gradient is not None, "gather() comes first"
        waiting, self._waiting = self._waiting, []
        whole = [entry for entry in waiting if entry[0] == slice(None)]
        parts = [entry for entry in waiting if entry[0] != slice(None)]
        if whole:
            _, grads, inputs = zip(*whole, strict=True)
            self._add(self._gradient, _one(grads), _one(inputs), self._empty)
        elif self._empty:
            self._gradient.zero_()
        self._empty = False
        for rows, grad_NO, x_NI in parts:
            self._add(self._gradient[rows], grad_NO, x_NI, False)

    def product(self, x_NI: Tensor, rows: slice = slice(None), add: Tensor | None = None) -> Tensor:
        """[N, out]: x times the rows of the matrix, transposed; `add` [N, out] is added before rounding."""
        if self._quantised is not None:
            out = fp8.product(fp8.quantise(x_NI, fp8.FORWARD), self._quantised.rows(rows), x_NI.dtype)
            return out if add is None else out.add_(add)
        weight = self.value[rows]
        return x_NI @ weight.T if add is None else torch.addmm(add, x_NI, weight.T)

    def backward(self, grad_NO: Tensor, x_NI: Tensor, rows: slice = slice(None)) -> Tensor:
        """Add the weight's gradient to the buffer, and return the input's [N, in]."""
        self.add_gradient(grad_NO, x_NI, rows)
        return self.input_gradient(grad_NO, rows)

    def input_gradient(self, grad_NO: Tensor, rows: slice = slice(None)) -> Tensor:
        """[N, in]"""
        if self._quantised is None:
            return grad_NO @ self.value[rows]
        columns = slice(*rows.indices(self._quantised.count)[:2])
        return fp8.product(fp8.quantise(grad_NO, fp8.BACKWARD), self._turned.columns(columns), grad_NO.dtype)

    def add_gradient(self, grad_NO: Tensor, x_NI: Tensor, rows: slice = slice(None)) -> None:
        """Add grad^T x to the gradient buffer: now, or with others when there are few rows. Neither may change meanwhile."""
        if not len(grad_NO):
            return
        self._waiting.append((rows, grad_NO, x_NI))
        if sum(len(grad) for _, grad, _ in self._waiting) >= ROWS:
            self.settle()

    def _add(self, sum_OI: Tensor, grad_NO: Tensor, x_NI: Tensor, empty: bool) -> None:
        if self._quantised is None:
            add_product(sum_OI, grad_NO.T, x_NI, empty)
        else:
            grad, x = fp8.quantise(grad_NO, fp8.BACKWARD), fp8.quantise(x_NI, fp8.FORWARD)
            fp8.add_product(sum_OI, grad.transposed(), x.transposed(), empty)


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
        attention, mlp = layer.self_attn, layer.mlp

        def matrix(*modules: nn.Linear) -> Matrix:
            return Matrix([module.weight for module in modules], dtype, eight_bits)

        self.drafter, self.dtype, self.pointwise = drafter, dtype, pointwise
        self.eps = drafter.shape.rms_norm_eps
        self.fc = matrix(drafter.fc)
        self.qkv = matrix(attention.q_proj, attention.k_proj, attention.v_proj)
        self.o = matrix(attention.o_proj)
        self.gate_up = matrix(mlp.gate_proj, mlp.up_proj)
        self.down = matrix(mlp.down_proj)
        self.head = matrix(drafter.lm_head)
        self.embedding_norm = Vector(layer.input_layernorm.weight)
        self.hidden_norm = Vector(layer.hidden_norm.weight)
        self.middle_norm = Vector(layer.post_attention_layernorm.weight)
        self.final_norm = Vector(drafter.norm.weight)
        self.matrices = [v for v in vars(self).values() if isinstance(v, Matrix)]
        self.vectors = [v for v in vars(self).values() if isinstance(v, Vector)]

    def refresh(self) -> None:
        """After an optimizer step."""
        with torch.no_grad():
            for matrix in self.matrices:
                matrix.refresh()

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
    return torch.mm(a_MK, b_KN, out_dtype=torch.float32) if halves and a_MK.is_cuda else a_MK @ b_KN


def _one(tensors: tuple[Tensor, ...]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)
