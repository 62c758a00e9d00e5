"""Losses and their in-forward gradients against autograd over loops, chunks, 8-bit and 16-bit products, compilation."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ray_eagle.drafter.model import Drafter
from ray_eagle.hidden_states.schema import Sample
from ray_eagle.training import fp8, losses, packing, pointwise, weights
from ray_eagle.training.losses import Objective, entering_counts, loss_weights, plain_row_losses
from ray_eagle.training.packing import make_pack
from ray_eagle.training.unroll import train_pack
from ray_eagle.training.weights import Weights
from tests.tiny import tiny_drafter, tiny_shape
from tests.unit.test_unroll import random_sample

OBJECTIVES = [Objective(k, n) for k in ("soft-ce", "acceptance", "mix") for n in ("soft", "hard")]  # type: ignore[arg-type]


def slow_loss(logits_D: Tensor, teacher_D: Tensor, target: int, objective: Objective) -> Tensor:
    """One position, by the definition."""
    q = torch.softmax(logits_D, 0)
    p = torch.softmax(teacher_D, 0)
    if objective.labels == "hard":
        p = torch.tensor([float(v == target) for v in range(len(q))], dtype=q.dtype)
    entropy = sum((-p[v] * torch.log(q[v]) for v in range(len(q)) if p[v] > 0), torch.zeros((), dtype=q.dtype))
    accepted = sum((torch.minimum(p[v], q[v]) for v in range(len(q))), torch.zeros((), dtype=q.dtype))
    share = {"soft-ce": 1.0, "acceptance": 0.0, "mix": math.exp(-3 * float(accepted.detach()))}[objective.kind]
    return share * entropy + (1 - share) * (1 - accepted)


@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda o: f"{o.kind}-{o.labels}")
@pytest.mark.parametrize("seed", range(3))
def test_rows_equal_the_definition_and_its_gradient(objective: Objective, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(9, 13, generator=generator, dtype=torch.float64) * 3).requires_grad_()
    teacher = torch.randn(5, 13, generator=generator, dtype=torch.float64) * 3
    row = torch.randint(0, 5, (9,), generator=generator)
    target = teacher[row].argmax(-1)
    target[seed::4] = -1  # outside the draft vocabulary: no part of the loss
    weight = torch.rand(9, generator=generator, dtype=torch.float64) * (target >= 0)
    expected = torch.stack(
        [slow_loss(x, teacher[r], int(y), objective) for x, r, y in zip(logits, row, target, strict=True)]
    )
    (gradient,) = torch.autograd.grad((expected * weight).sum(), logits)
    changed = logits.detach().clone()
    found, best = plain_row_losses(changed, teacher, row, target, weight, objective)
    enters = target >= 0
    torch.testing.assert_close(found[enters], expected.detach()[enters], atol=1e-12, rtol=0)
    torch.testing.assert_close(changed, gradient, atol=1e-12, rtol=0)
    assert best.tolist() == logits.argmax(-1).tolist()
    kept = logits.detach().clone()
    assert torch.equal(plain_row_losses(kept, teacher, row, target, None, objective)[0], found)
    assert torch.equal(kept, logits), "without weights the logits stay"


class Case:
    """A drafter and a batch; what `train_pack` makes of them."""

    def __init__(self, seed: int = 0, documents: int = 6, steps: int = 3) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.shape = tiny_shape(hidden=16, vocab=48, draft_vocab=44)
        self.drafter = tiny_drafter(self.shape, seed=seed)
        self.embedding = torch.randn(48, 16, generator=generator, dtype=torch.float64)
        self.head = torch.randn(48, 16, generator=generator, dtype=torch.float64)
        self.samples = [random_sample(generator, self.shape, self.head) for _ in range(documents)]
        self.steps = steps

    def gradients(
        self,
        dtype: torch.dtype = torch.float64,
        objective: Objective | None = None,
        batches: list[list[Sample]] | None = None,
        **options: Any,
    ) -> tuple[float, dict[str, Tensor]]:
        drafter = self.twin(torch.float64 if dtype == torch.float64 else torch.float32)
        return self.of(drafter, dtype, objective, batches, **options)

    def twin(self, dtype: torch.dtype) -> Drafter:
        drafter = Drafter(self.shape).to(dtype)
        drafter.load_state_dict(self.drafter.state_dict())
        return drafter

    def of(
        self,
        drafter: Drafter,
        dtype: torch.dtype,
        objective: Objective | None = None,
        batches: list[list[Sample]] | None = None,
        **options: Any,
    ) -> tuple[float, dict[str, Tensor]]:
        """The loss and the gradients of a drafter's parameters."""
        multiple = options.pop("multiple", 1)
        packs = [make_pack(b, self.steps, multiple=multiple) for b in batches or [self.samples]]
        packs = [pack.to(torch.device("cpu"), dtype) for pack in packs]
        counts_K = sum((entering_counts(p, drafter.t2d) for p in packs), torch.zeros(self.steps, dtype=torch.int64))
        weights_K = loss_weights(counts_K, 0.8).to(torch.promote_types(dtype, torch.float32))
        copies = Weights(drafter, dtype, **options)
        head = self.head[drafter.target_ids].to(dtype)
        total = 0.0
        for pack in packs:
            scores = train_pack(copies, pack, self.embedding.to(dtype), head, weights_K, objective)
            total += sum(float(s.losses_N[s.enters_N].sum()) * float(w) for s, w in zip(scores, weights_K, strict=True))
        return total, {n: p.grad.clone() for n, p in drafter.named_parameters() if p.grad is not None}


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys() and len(one) == 13
    return max(
        float((a.double() - b.double()).norm() / b.double().norm())
        for a, b in zip(one.values(), other.values(), strict=True)
    )


@pytest.mark.parametrize("objective", [Objective("soft-ce", "hard"), Objective("acceptance")])
def test_gradients_of_other_objectives_equal_differences(objective: Objective) -> None:
    case = Case(1)
    _, gradients = case.gradients(objective=objective)
    for name in ("fc.weight", "midlayer.self_attn.k_proj.weight", "norm.weight", "lm_head.weight"):
        generator = torch.Generator().manual_seed(2)
        losses_2 = []
        direction = torch.randn(gradients[name].shape, generator=generator, dtype=torch.float64)
        for sign in (1, -1):
            drafter = case.twin(torch.float64)
            with torch.no_grad():
                drafter.get_parameter(name).add_(direction, alpha=sign * 1e-6)
            losses_2.append(case.of(drafter, torch.float64, objective)[0])
        expected = (losses_2[0] - losses_2[1]) / 2e-6
        assert float((gradients[name] * direction).sum()) == pytest.approx(expected, rel=1e-4, abs=1e-8)


def test_small_chunks_and_immediate_sums_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(2)
    total, gradients = case.gradients()
    for module in (packing, losses):
        monkeypatch.setattr(module, "BLOCK", 3)
    monkeypatch.setattr(losses, "ROWS_CPU", 18)
    monkeypatch.setattr(losses, "CACHED", 5 * 44)
    monkeypatch.setattr(weights, "ROWS", 1)
    again, same = case.gradients()
    assert again == pytest.approx(total, rel=1e-12) and distance(same, gradients) < 1e-12


def test_packs_add_up_and_a_pack_without_positions_adds_nothing() -> None:
    case = Case(3)
    silent = [s for s in case.samples if not len(make_pack([s], 1).steps[0].at_N)]
    talking = [s for s in case.samples if len(make_pack([s], 1).steps[0].at_N)]
    assert len(talking) > 2
    muted = talking[0]
    silent.append(
        Sample(**{**vars(muted), "loss_mask": muted.loss_mask * 0, "last": muted.last[:0], "top1": muted.top1[:0]})
    )
    whole, gradients = case.gradients(batches=[talking])
    parts, sums = case.gradients(batches=[talking[:1], silent, talking[1:]])
    assert parts == pytest.approx(whole, rel=1e-12) and distance(sums, gradients) < 1e-12


@pytest.mark.parametrize("multiple", [7, 64])
def test_rows_that_fill_up_to_a_multiple_change_nothing(multiple: int) -> None:
    case = Case(6)
    total, gradients = case.gradients()
    filled, same = case.gradients(multiple=multiple)
    assert filled == pytest.approx(total, rel=1e-12) and distance(same, gradients) < 1e-12


def test_gradients_add_to_those_of_another_call() -> None:
    case = Case(4)
    drafter = case.twin(torch.float64)
    _, once = case.of(drafter, torch.float64)
    _, twice = case.of(drafter, torch.float64)
    assert distance(twice, {name: 2 * value for name, value in once.items()}) < 1e-12


def test_sixteen_and_eight_bits_are_close() -> None:
    case = Case(5, documents=20)
    _, exact = case.gradients()
    _, single = case.gradients(torch.float32)
    _, half = case.gradients(torch.bfloat16)
    _, eight = case.gradients(torch.bfloat16, eight_bits=True)
    assert all(g.dtype == torch.float32 for g in half.values()), "gradients gather in float32"
    assert distance(single, exact) < 1e-4 and distance(half, exact) < 0.1
    for name, gradient in eight.items():
        assert torch.cosine_similarity(gradient.double().flatten(), exact[name].flatten(), dim=0) > 0.8, name
    assert distance(half, exact) > 1e-4 and distance(eight, half) > 1e-2, "the small types were really used"


@pytest.mark.parametrize(("kind", "tolerance"), [(fp8.FORWARD, 2**-4), (fp8.BACKWARD, 2**-3)])
def test_quantised_numbers_and_products(kind: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(0)
    a, b = torch.randn(21, 32) * 1e-3, torch.randn(48, 32) * 70
    qa, qb = fp8.quantise([a], kind), fp8.quantise([b], fp8.FORWARD)
    assert qa.values.shape == (32, 32) and qa.values.dtype == kind and qa.values[21:].float().abs().sum() == 0
    back = qa.values[:21].float() * qa.scale
    assert ((back - a).abs() <= tolerance * a.abs() + 1e-2 * a.abs().max()).all() and not torch.equal(back, a)
    product = fp8.product(qa, qb, torch.float32)
    assert product.shape == (21, 48) and ((product - a @ b.T).norm() / (a @ b.T).norm()) < tolerance
    for empty in (False, True):
        total = torch.ones(32, 32)
        fp8.add_product(total, qa.transposed(), qa.transposed(), empty)
        assert ((total - float(not empty) - a.T @ a).norm() / (a.T @ a).norm()) < 2 * tolerance
    parts = [a[:5], a[5:5], a[5:]]
    whole, zeros = fp8.quantise(parts, kind), torch.zeros(11, 32)
    assert whole.values.shape == (32, 32) and torch.equal(whole.scale, qa.scale)
    again = fp8.quantise([torch.cat([a[:5], zeros, a[5:]])], kind)
    assert torch.equal(whole.values.float(), again.values.float()) and torch.equal(
        whole.turned.float(), again.turned.float()
    )
    zero = fp8.quantise([torch.zeros(3, 16)], kind)
    assert torch.equal(fp8.product(zero, zero, torch.float32), torch.zeros(3, 3))


def test_rows_of_parts_of_odd_sizes_are_found_again_in_8_bits() -> None:
    torch.manual_seed(0)
    parts = [torch.nn.Parameter(torch.randn(rows, 32)) for rows in (16, 8, 24)]
    matrix, x = weights.Matrix(parts, torch.float32, eight_bits=True), torch.randn(5, 32)
    matrix.quantise()
    whole, exact = matrix.product(x), x @ torch.cat([*parts]).detach().T
    assert (whole - exact).norm() / exact.norm() < 0.1
    for rows in (slice(16, 24), slice(24, None), slice(16, None)):
        assert torch.allclose(matrix.product(x, rows), whole[:, rows], atol=1e-4)
        back = matrix.input_gradient(matrix.incoming(whole[:, rows].contiguous()), rows)
        exact = whole[:, rows] @ torch.cat([*parts]).detach()[rows]
        assert (back - exact).norm() / exact.norm() < 0.2


class Largest(TorchDispatchMode):
    """The most elements of any tensor with D columns that an operation returns."""

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.columns, self.rows = columns, 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, Tensor) and tensor.dim() == 2 and tensor.shape[1] == self.columns:
                self.rows = max(self.rows, len(tensor))
        return out


def test_never_more_than_a_chunk_of_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (packing, losses):
        monkeypatch.setattr(module, "BLOCK", 4)
    monkeypatch.setattr(losses, "ROWS_CPU", 24)
    monkeypatch.setattr(weights, "ROWS", 1)
    case = Case(6, documents=20)
    positions = sum(len(s.at_N) for s in make_pack(case.samples, case.steps).steps)
    with Largest(44) as largest:
        case.gradients()
    assert 0 < largest.rows <= 24 < positions / 4


def test_compiled_functions_equal_the_plain_ones_and_do_not_compile_for_every_pack() -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    case = Case(7, documents=40)
    counter = CompileCounterWithBackend("aot_eager")
    fast = pointwise.compiled(counter)  # type: ignore[arg-type]
    torch._dynamo.reset()
    for size in range(1, 21):
        batch = [case.samples[(size * 7 + i) % 40] for i in range(size)]
        total, plain = case.gradients(batches=[batch])
        again, compiled = case.gradients(batches=[batch], pointwise=fast)
        assert again == pytest.approx(total, rel=1e-9) and distance(compiled, plain) < 1e-9
        if size == 6:
            settled = counter.frame_count
    assert counter.frame_count <= 3 * len(pointwise.PLAIN.__dict__), "three compilations a function at most"
    assert counter.frame_count == settled, "packs of other sizes compile nothing more"
