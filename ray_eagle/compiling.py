"""`torch.compile` for functions of rows, without a compilation for every number of them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def compile_rows(function: Callable[..., Any], backend: str = "inductor") -> Callable[..., Any]:
    """A pure function of tensors with the same number of rows, compiled at its first call, for any such number.

    Every other size is a constant of the kernels: another one is another compilation. Vectors are no rows. Calls raise what
    the compiler raises, a RuntimeError.
    """
    # not dynamic, or heads and widths become symbols when queries, and keys with values, come in turn
    fast = torch.compile(function, backend=backend, dynamic=False)

    def call(*arguments: Any) -> Any:
        rows = arguments[0].shape[0]
        if rows < 2:  # 0 and 1 are constants to the compiler: they would cost a compilation each
            return function(*arguments)
        for argument in arguments:
            if isinstance(argument, Tensor) and argument.dim() > 1:
                torch._dynamo.maybe_mark_dynamic(argument, 0)
        return fast(*arguments)

    return call
