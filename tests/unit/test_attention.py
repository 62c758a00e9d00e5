"""Attention of an unroll step against loops over positions and heads, and its written-out gradients against numbers."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from ray_eagle.training.attention import Keys, attend, attend_backward
from ray_eagle.training.packing import Pack, make_pack
from tests.tiny import tiny_shape
from tests.unit.test_unroll import random_sample

HEADS, GROUPS, WIDTH, STEPS = 4, 2, 6, 4
SCALE = 0.37


def random_pack(seed: int, everywhere: bool = False) -> Pack:
    generator = torch.Generator().manual_seed(seed)
    shape = tiny_shape(hidden=4, vocab=20, draft_vocab=20)
    head = torch.randn(20, 4, generator=generator, dtype=torch.float64)
    return make_pack([random_sample(generator, shape, head) for _ in range(9)], STEPS, everywhere=everywhere)


def random_inputs(pack: Pack, k: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Queries of step k, step-0 keys and values, own keys and values."""
    generator = torch.Generator().manual_seed(k)
    tokens, first = len(pack.tokens_T), len(pack.steps[0].at_N)
    sizes = (
        (len(pack.steps[k].at_N), HEADS, WIDTH),
        *[(tokens, GROUPS, WIDTH)] * 2,
        *[(STEPS - 1, first, GROUPS, WIDTH)] * 2,
    )
    return [torch.randn(*size, generator=generator, dtype=torch.float64).to(dtype) for size in sizes]


def slow_attention(pack: Pack, k: int, inputs: list[Tensor]) -> Tensor:
    queries, keys, values, own_keys, own_values = inputs
    first = pack.steps[0].at_N.tolist()
    out = []
    for row, t in enumerate(pack.steps[k].at_N.tolist()):
        start = t - int(pack.positions_T[t])
        for head in range(HEADS):
            group = head // (HEADS // GROUPS)
            seen = [(keys[j, group], values[j, group]) for j in range(start, t + 1)]
            seen += [(own_keys[i, first.index(t), group], own_values[i, first.index(t), group]) for i in range(k)]
            scores = [math.exp(SCALE * float(queries[row, head] @ key)) for key, _ in seen]
            out.append(sum(s / sum(scores) * value for s, (_, value) in zip(scores, seen, strict=True)))
    return torch.stack(out).view(-1, HEADS, WIDTH)


@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize("k", range(STEPS))
def test_equals_one_softmax_over_everything_a_position_sees(k: int, everywhere: bool) -> None:
    pack = random_pack(k, everywhere)
    inputs = random_inputs(pack, k)
    assert len(inputs[0])
    output, _ = attend(inputs[0], Keys(*inputs[1:]), k, pack.steps[k], pack.spans, SCALE)
    torch.testing.assert_close(output, slow_attention(pack, k, inputs), atol=1e-12, rtol=0)


class Differentiable(torch.autograd.Function):
    """The pair of functions as autograd sees them, so that gradcheck can judge the second."""

    @staticmethod
    def forward(ctx: Any, pack: Pack, k: int, *inputs: Tensor) -> Tensor:
        ctx.pack, ctx.k = pack, k
        output, lse = attend(inputs[0], Keys(*inputs[1:]), k, pack.steps[k], pack.spans, SCALE)
        ctx.save_for_backward(*inputs, output, lse)
        return output

    @staticmethod
    def backward(ctx: Any, *grad: Tensor) -> tuple[Any, ...]:
        queries, *seen, output, lse = ctx.saved_tensors
        changes = Keys(*map(torch.zeros_like, seen))
        index, spans = ctx.pack.steps[ctx.k], ctx.pack.spans
        found = attend_backward(grad[0], queries, output, lse, Keys(*seen), changes, ctx.k, index, spans, SCALE)
        return (None, None, found, *vars(changes).values())


@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize("k", range(STEPS))
def test_gradients_equal_differences(k: int, everywhere: bool) -> None:
    pack = random_pack(10 + k, everywhere)
    inputs = [x.requires_grad_() for x in random_inputs(pack, k)]
    assert torch.autograd.gradcheck(
        lambda *x: Differentiable.apply(pack, k, *x), inputs, fast_mode=True, eps=1e-6, atol=1e-7
    )


def test_gradients_add_to_what_is_there() -> None:
    pack = random_pack(3)
    inputs = random_inputs(pack, 2)
    args = (Keys(*inputs[1:]), 2, pack.steps[2], pack.spans, SCALE)
    output, lse = attend(inputs[0], *args)
    once, twice = (Keys(*map(torch.zeros_like, inputs[1:])) for _ in range(2))
    for changes in (once, twice, twice):
        attend_backward(torch.ones_like(output), inputs[0], output, lse, args[0], changes, *args[1:])
    for one, two in zip(vars(once).values(), vars(twice).values(), strict=True):
        assert one.abs().sum() and torch.allclose(2 * one, two)


def test_sixteen_bits_keep_the_sums_wide() -> None:
    pack = random_pack(4)
    inputs = random_inputs(pack, 3)
    halves = [x.bfloat16() for x in inputs]
    output, lse = attend(halves[0], Keys(*halves[1:]), 3, pack.steps[3], pack.spans, SCALE)
    assert output.dtype == torch.bfloat16 and lse.dtype == torch.float32
    expected = slow_attention(pack, 3, inputs)
    assert ((output.double() - expected).norm() / expected.norm()) < 2e-2


def test_a_pack_without_positions_that_count() -> None:
    generator = torch.Generator().manual_seed(0)
    shape = tiny_shape(hidden=4, vocab=20, draft_vocab=20)
    head = torch.randn(20, 4, generator=generator, dtype=torch.float64)
    sample = random_sample(generator, shape, head)
    while len(make_pack([sample], 1).steps[0].at_N):
        sample = random_sample(generator, shape, head)
    pack = make_pack([sample], 2)
    inputs = [
        torch.randn(n, h, WIDTH, dtype=torch.float64)
        for n, h in ((0, HEADS), (len(pack.tokens_T), GROUPS), (len(pack.tokens_T), GROUPS))
    ]
    own = torch.zeros(1, 0, GROUPS, WIDTH, dtype=torch.float64)
    for k in range(2):
        output, lse = attend(inputs[0], Keys(*inputs[1:], own, own), k, pack.steps[k], pack.spans, SCALE)
        assert output.shape == (0, HEADS, WIDTH) and lse.shape == (0, HEADS)
