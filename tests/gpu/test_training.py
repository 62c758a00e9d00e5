"""On an NVIDIA GPU: flash attention, Triton kernels, compiled and 8-bit steps against the plain path; no waiting for the GPU."""

import os

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from ray_eagle.drafter.model import Drafter
from ray_eagle.drafter.shape import DrafterShape
from ray_eagle.drafter.start import random_drafter
from ray_eagle.hidden_states.schema import Sample
from ray_eagle.target.sizes import LatentSizes
from ray_eagle.training import attention, fp8, losses, pointwise
from ray_eagle.training.attention import Keys, attend, attend_backward
from ray_eagle.training.losses import Objective, entering_counts, loss_weights, plain_row_losses, row_losses
from ray_eagle.training.packing import Pack, make_pack
from ray_eagle.training.unroll import train_pack
from ray_eagle.training.weights import Weights
from tests.random_data import random_tokens

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
NEEDS_8_BITS = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < fp8.CAPABILITY, reason="needs 8-bit products"
)
GPU = torch.device("cuda")
STEPS = 4
HIDDEN, VOCAB, DRAFTS = 256, 640, 512


def random_samples(seed: int, count: int = 8, hidden: int = HIDDEN) -> list[Sample]:
    """Ragged documents of several turns, one of a single token, one that the assistant says nothing in."""
    generator = torch.Generator().manual_seed(seed)
    rows = [random_tokens(generator, VOCAB, 300) for _ in range(count)]
    rows += [([3], [0]), (rows[0][0], [0] * len(rows[0][0]))]
    samples = []
    for i, (tokens, mask) in enumerate(rows):
        teaching = sum(mask[1:])
        samples.append(
            Sample(
                str(i),
                "s",
                torch.tensor(tokens).int(),
                torch.tensor(mask).to(torch.uint8),
                torch.randn(len(tokens), 3 * hidden, generator=generator).bfloat16(),
                torch.randn(teaching, hidden, generator=generator).bfloat16(),
                torch.randint(0, VOCAB, (teaching,), generator=generator).int(),
                torch.randn(teaching),
            )
        )
    return samples


def relative(one: Tensor, other: Tensor) -> float:
    return float((one.double().cpu() - other.double().cpu()).norm() / other.double().norm().cpu())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "groups", "width"), [(8, 2, 128), (4, 4, 64), (14, 2, 64), (3, 3, 32)])
@pytest.mark.parametrize("k", range(STEPS))
@pytest.mark.parametrize("options", [{}, {"everywhere": True}, {"multiple": 64}])
def test_flash_attention_equals_float64(
    k: int, heads: int, groups: int, width: int, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    pack = make_pack(random_samples(k), STEPS, **options)
    torch.manual_seed(k)
    sizes = [
        (len(pack.steps[k].at_N), heads, width),
        *[(len(pack.tokens_T), groups, width)] * 2,
        *[(STEPS - 1, len(pack.steps[0].at_N), groups, width)] * 2,
    ]
    inputs = [torch.randn(*size).to(dtype) for size in sizes]
    grad = torch.randn(*sizes[0]).to(dtype)
    found = []
    for device, kind in ((GPU, dtype), (torch.device("cpu"), torch.float64)):
        there = pack.to(device, torch.float32)
        index, spans, scale = there.steps[k], there.spans, width**-0.5
        queries, *seen = (x.to(device, kind) for x in inputs)
        output, lse = attend(queries, Keys(*seen), k, index, spans, scale)
        changes = Keys(*(torch.zeros_like(x, dtype=torch.promote_types(kind, torch.float32)) for x in seen))
        again = attend_backward(
            grad.to(device, kind), queries, output, lse, Keys(*seen), changes, k, index, spans, scale
        )
        found.append([output, lse, again, *vars(changes).values()][: 7 if k else 5])
    for one, other in zip(*found, strict=True):
        assert torch.isfinite(one).all() and relative(one, other) < 1.5e-2


@pytest.mark.parametrize("kind", ["soft-ce", "acceptance", "mix"])
@pytest.mark.parametrize("labels", ["soft", "hard"])
@pytest.mark.parametrize("size", [100, 4096, 32000])
def test_the_loss_kernel_equals_the_plain_one(kind: str, labels: str, size: int) -> None:
    torch.manual_seed(size)
    objective = Objective(kind, labels)  # type: ignore[arg-type]
    logits = (torch.randn(70, size, device=GPU) * 3).bfloat16()
    teacher = torch.randn(33, size, device=GPU) * 3
    row = torch.randint(0, 33, (70,), device=GPU)
    target = torch.randint(-size // 4, size, (70,), device=GPU).clamp(min=-1)
    weight = torch.rand(70, device=GPU) * (target >= 0)
    wide = logits.double()
    expected, best = plain_row_losses(wide, teacher.double(), row, target, weight.double(), objective)
    fast = logits.clone()
    found, choice = row_losses(fast, teacher, row, target, weight, objective)
    torch.testing.assert_close(found.double(), expected, atol=1e-4, rtol=1e-4)
    assert relative(fast, wide) < 4e-3
    assert (logits.gather(1, choice[:, None]) == logits.gather(1, best[:, None])).all(), "equal logits may tie"
    kept = logits.clone()
    row_losses(kept, teacher, row, target, None, objective)
    assert torch.equal(kept, logits)


class Step:
    """A drafter of hidden size 256 on the GPU and a batch."""

    def __init__(self, seed: int = 0, *, latent: bool = False) -> None:
        shape = DrafterShape(
            hidden_size=HIDDEN, intermediate_size=512, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
            vocab_size=VOCAB, draft_vocab_size=DRAFTS, aux_layers=(1, 2, 3),
        )  # fmt: skip
        if latent:
            sizes = LatentSizes(
                q_lora_rank=64, kv_lora_rank=48, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32
            )
            shape = shape.model_copy(update={"latent": sizes, "head_dim": 48, "num_key_value_heads": 4})
        self.drafter = random_drafter(shape, seed)
        torch.manual_seed(seed)
        self.embedding, self.head = torch.randn(VOCAB, HIDDEN), torch.randn(DRAFTS, HIDDEN) * 0.1
        self.samples = random_samples(seed)

    def gradients(
        self, device: torch.device, dtype: torch.dtype, multiple: int = 1, **options: Any
    ) -> dict[str, Tensor]:
        drafter = Drafter(self.drafter.shape)
        drafter.load_state_dict(self.drafter.state_dict())
        drafter.to(device)
        weights = Weights(drafter, dtype, **options)  # type: ignore[arg-type]
        self.train(weights, make_pack(self.samples, STEPS, multiple=multiple).to(device, dtype))
        return {name: p.grad for name, p in drafter.named_parameters() if p.grad is not None}

    def train(self, weights: Weights, pack: Pack) -> None:
        device = pack.tokens_T.device
        counted = loss_weights(entering_counts(pack, weights.drafter.t2d), 0.8).float()
        train_pack(
            weights, pack, self.embedding.to(device, weights.dtype), self.head.to(device, weights.dtype), counted
        )


@pytest.fixture(scope="module")
def fast() -> pointwise.Pointwise:
    return pointwise.compiled()


@pytest.mark.parametrize("latent", [False, True])
def test_a_step_on_the_gpu_equals_the_cpu(fast: pointwise.Pointwise, latent: bool) -> None:
    step = Step(latent=latent)
    exact = step.gradients(torch.device("cpu"), torch.float32)
    for options in ({}, {"pointwise": fast}, {"multiple": 64}):
        assert len(exact) == (16 if latent else 13)
        for name, gradient in step.gradients(GPU, torch.float32, **options).items():
            assert relative(gradient, exact[name]) < 1e-3, (name, options)
        for name, gradient in step.gradients(GPU, torch.bfloat16, **options).items():
            assert gradient.dtype == torch.float32 and relative(gradient, exact[name]) < 3e-2, (name, options)


@NEEDS_8_BITS
def test_eight_bits_on_the_gpu_equal_their_emulation(fast: pointwise.Pointwise) -> None:
    torch.manual_seed(0)
    a, b = torch.randn(37, 4096, dtype=torch.bfloat16), torch.randn(512, 4096, dtype=torch.bfloat16)
    for kind in (fp8.FORWARD, fp8.BACKWARD):
        products = []
        for device in (GPU, torch.device("cpu")):
            x, y = fp8.quantise([a.to(device)], kind), fp8.quantise([b.to(device)], fp8.FORWARD)
            sums = torch.full((2, 4096, 4096), 1e4, device=device)
            for total, empty in zip(sums, (False, True), strict=True):
                fp8.add_product(total, x.transposed(), fp8.quantise([a.to(device)], fp8.FORWARD).transposed(), empty)
            both = [fp8.product(x, y, torch.bfloat16, fast=few_bits) for few_bits in (False, True)]
            products.append((x.values.float(), *both, sums[0] - 1e4, sums[1]))
        for one, other in zip(*products, strict=True):
            assert one.shape == other.shape and relative(one, other) < 1e-2
    step = Step(1)
    exact = step.gradients(torch.device("cpu"), torch.float32)
    for name, gradient in step.gradients(GPU, torch.bfloat16, eight_bits=True, pointwise=fast).items():
        assert torch.cosine_similarity(gradient.cpu().flatten(), exact[name].flatten(), dim=0) > 0.9, name


@NEEDS_8_BITS
@pytest.mark.parametrize("kind", [fp8.FORWARD, fp8.BACKWARD])
@pytest.mark.parametrize(
    ("size", "parts"), [((1, 16), 1), ((37, 256), 1), ((300, 1040), 3), ((4096, 48), 2), ((517, 64), 4)]
)
def test_the_quantising_kernel_equals_the_plain_one(size: tuple[int, int], parts: int, kind: torch.dtype) -> None:
    torch.manual_seed(size[0])
    x = (torch.randn(size) * 10 ** torch.randn(size)).bfloat16()
    edges = torch.randint(0, size[0] + 1, (parts - 1,)).sort().values.tolist()
    values, turned, scale = fp8.plain_quantise(list(x.tensor_split(edges)), kind, True, True)
    found = fp8.quantise(list(x.to(GPU).tensor_split(edges)), kind)
    torch.testing.assert_close(found.scale.cpu(), scale)
    assert torch.equal(found.values.T.view(torch.uint8), found.turned.view(torch.uint8)) and found.count == len(x)
    assert found.values.shape == values.shape and found.turned.shape == turned.shape
    off = (found.values.float().cpu() - values.float()).abs() / values.float().abs().clamp(min=1e-9)
    assert (off > 0).float().mean() < 1e-3, "division may round to another neighbour, and hardly ever does"
    for only in ({"turned": False}, {"values": False}):
        alone = fp8.quantise(list(x.to(GPU).tensor_split(edges)), kind, **only)
        kept = (alone.values, found.values) if "turned" in only else (alone.turned, found.turned)
        assert torch.equal(kept[0].view(torch.uint8), kept[1].view(torch.uint8))
    x[0, 3] = float("nan")
    assert fp8.quantise([x.to(GPU)], kind).scale.isnan()


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def test_deterministic_steps_are_bit_equal(deterministic: None, fast: pointwise.Pointwise) -> None:
    step = Step(2)
    one, other = (step.gradients(GPU, torch.bfloat16, pointwise=fast) for _ in range(2))
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("eight_bits", [False, pytest.param(True, marks=NEEDS_8_BITS)])
def test_a_step_never_waits_for_the_gpu(eight_bits: bool, fast: pointwise.Pointwise) -> None:
    step = Step(3)
    drafter = step.drafter.to(GPU)
    drafter.inverse_frequencies = drafter.inverse_frequencies.to(GPU)
    step.embedding, step.head = step.embedding.to(GPU, torch.bfloat16), step.head.to(GPU, torch.bfloat16)
    weights = Weights(drafter, torch.bfloat16, eight_bits=eight_bits, pointwise=fast)
    step.train(weights, make_pack(step.samples, STEPS, pin=True).to(GPU, torch.bfloat16))  # kernels load and compile
    torch.cuda.set_sync_debug_mode("error")
    try:
        step.train(weights, make_pack(step.samples[1:], STEPS, pin=True, multiple=64).to(GPU, torch.bfloat16))
        weights.refresh()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_step_never_holds_the_logits_of_all_positions() -> None:
    """Peak memory of head and loss, at a draft vocabulary where 4 steps' float32 logits would be far more."""
    torch.manual_seed(0)
    shape = DrafterShape(
        hidden_size=HIDDEN, intermediate_size=512, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
        vocab_size=32000, draft_vocab_size=32000, aux_layers=(1, 2, 3),
    )  # fmt: skip
    drafter = random_drafter(shape, 0).to(GPU)
    weights = Weights(drafter, torch.bfloat16)
    samples = random_samples(0, count=160)
    pack = make_pack(samples, STEPS).to(GPU, torch.bfloat16)
    positions = sum(len(s.at_N) for s in pack.steps)
    head, embedding = (torch.randn(32000, HIDDEN, device=GPU, dtype=torch.bfloat16) for _ in range(2))
    counted = loss_weights(entering_counts(pack, drafter.t2d), 0.8).float()
    train_pack(weights, pack, embedding, head, counted)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    train_pack(weights, pack, embedding, head, counted)
    peak = torch.cuda.max_memory_allocated() - before
    assert positions > 4 * losses.ROWS and peak < positions * 32000 * 4 / 3


def test_flash_is_what_runs() -> None:
    assert attention.flash_runs(GPU, torch.bfloat16, 128) and not attention.flash_runs(GPU, torch.float32, 128)
