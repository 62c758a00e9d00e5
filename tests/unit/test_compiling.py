"""Functions of rows compile once for each size that is no number of rows, whatever comes when."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from ray_eagle.compiling import compile_rows


class Sizes:
    """A backend that compiles nothing, and notes what was to be compiled: of all tensors their sizes, symbols as None."""

    def __init__(self) -> None:
        self.compiled: list[set[tuple[int | None, ...]]] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        values = [node.meta["example_value"] for node in graph.graph.find_nodes(op="placeholder")]
        sizes = [x.shape for x in values if isinstance(x, Tensor)]
        self.compiled.append({tuple(n if isinstance(n, int) else None for n in shape) for shape in sizes})
        return graph.forward


def scaled(x_NAE: Tensor, y_N: Tensor, z_NE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
    return x_NAE * y_N[:, :1, None] + z_NE[:, None] * weight_E + eps


@pytest.mark.parametrize("seed", range(3))
def test_other_numbers_of_rows_compile_nothing_and_every_other_size_is_a_constant(seed: int) -> None:
    torch._dynamo.reset()
    rng, backend = random.Random(seed), Sizes()
    fast = compile_rows(scaled, backend)  # type: ignore[arg-type]
    seen: set[tuple[int, int]] = set()
    whole = torch.randn(200, 8)
    for call in range(60):
        rows = rng.choice([0, 1, 2, 3, 7, 8, 64, rng.randint(2, 200)])
        heads, width = rng.choice([(4, 8), (2, 8), (2, 16), (1, 8)])
        y_N3 = torch.randn(rows, 3)
        z_NE = whole[:rows] if width == 8 and call % 2 else torch.randn(rows, width)
        given = (torch.randn(rows, heads, width), y_N3, z_NE, torch.randn(width), 1e-5)
        before = len(backend.compiled)
        assert torch.equal(fast(*given), scaled(*given))
        new = rows > 1 and (heads, width) not in seen
        assert len(backend.compiled) == before + new
        if new:
            seen.add((heads, width))
            assert backend.compiled[-1] == {(None, heads, width), (None, 3), (None, width), (width,)}
    assert len(seen) == 4


def test_the_settings_of_others_stay_as_they_are() -> None:
    torch._dynamo.reset()
    backend = Sizes()
    compile_rows(scaled, backend)(  # type: ignore[arg-type]
        torch.randn(4, 2, 8), torch.randn(4, 3), torch.randn(4, 8), torch.randn(8), 1.0
    )
    assert backend.compiled and torch._dynamo.config.automatic_dynamic_shapes
