"""Unrolled training against golden numbers of an independent implementation and against loops over positions."""

import json
import random
from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from ray_eagle.drafter.model import Drafter
from ray_eagle.drafter.shape import DrafterShape
from ray_eagle.hidden_states.schema import Sample, sample_id
from ray_eagle.training.losses import entering_counts, loss_weights
from ray_eagle.training.packing import counting_depth, make_pack
from ray_eagle.training.unroll import Unroll, score_steps, train_pack
from ray_eagle.training.weights import Weights
from tests.slow_unroll import SlowLayer, counts, plain_layer, slow_unroll
from tests.tiny import tiny_drafter, tiny_shape

GOLDEN = Path(__file__).parent / "eagle3_golden.safetensors"


def make_sample(
    tokens: torch.Tensor, mask: torch.Tensor, aux: torch.Tensor, last_T: torch.Tensor, head: torch.Tensor
) -> Sample:
    """A sample as extraction would store it: teacher rows where the next token is supervised."""
    last = last_T[:-1][mask[1:].bool()]
    logits = last @ head.T
    return Sample(
        sample_id(tokens.tolist(), mask.tolist()), "s", tokens.int(), mask.to(torch.uint8), aux, last,
        logits.argmax(-1).int(), logits.logsumexp(-1).float(),
    )  # fmt: skip


class Golden:
    def __init__(self, case: str) -> None:
        with safe_open(GOLDEN, framework="pt") as file:
            self.settings = json.loads(file.metadata()["cases"])[case]
            names = [name for name in file.keys() if name.startswith(f"{case}.")]  # noqa: SIM118
            self.tensors = {name.removeprefix(f"{case}."): file.get_tensor(name) for name in names}
        weights = {k.removeprefix("drafter."): v for k, v in self.tensors.items() if k.startswith("drafter.")}
        head_dim = {"single_document": 16, "packed_turns": 32}[case]
        eps, theta = {"single_document": (1e-5, 1e4), "packed_turns": (1e-6, 1e6)}[case]
        self.shape = DrafterShape(
            hidden_size=64, intermediate_size=112, num_attention_heads=4, num_key_value_heads=2, head_dim=head_dim,
            vocab_size=160, draft_vocab_size=48, aux_layers=(1, 2, 3), rms_norm_eps=eps,
            rope_parameters={"rope_type": "default", "rope_theta": theta},
        )  # fmt: skip
        self.drafter = Drafter(self.shape)
        self.drafter.load_state_dict(weights)
        self.embedding, self.head = self.tensors["target.embed_tokens.weight"], self.tensors["target.lm_head.weight"]

    def samples(self, supervise_all: bool = False) -> list[Sample]:
        t = self.tensors
        made = []
        for document in t["input.document"].unique():
            rows = t["input.document"] == document
            mask = torch.ones(int(rows.sum())) if supervise_all else t["input.supervised"][rows]
            made.append(
                make_sample(
                    t["input.tokens"][rows], mask.long(), t["input.aux"][rows], t["input.last_normed"][rows], self.head
                )
            )
        return made


@pytest.mark.parametrize("case", ["single_document", "packed_turns"])
def test_logits_equal_the_golden_ones_at_every_defined_position(case: str) -> None:
    golden = Golden(case)
    expected, defined = golden.tensors["expected.logits"], golden.tensors["expected.defined"]
    samples = golden.samples()
    pack = make_pack(samples, 4, everywhere=True)
    unrolled = Unroll(Weights(golden.drafter, torch.float32), pack, golden.embedding)
    for k, output in enumerate(unrolled.outputs):
        logits = golden.drafter.logits(output)
        assert pack.steps[k].at_N.tolist() == defined[k].nonzero()[:, 0].tolist()
        torch.testing.assert_close(logits, expected[k][defined[k]], atol=5e-5, rtol=0)


@pytest.mark.parametrize("case", ["single_document", "packed_turns"])
def test_losses_accuracies_and_masks_equal_the_golden_ones(case: str) -> None:
    golden = Golden(case)
    expected = {k: v for k, v in golden.tensors.items() if k.startswith("expected.")}
    pack = make_pack(golden.samples(), 4)
    chained = None
    step_losses = []
    for k, scores in enumerate(
        score_steps(
            Weights(golden.drafter, torch.float32), pack, golden.embedding, golden.head[golden.drafter.target_ids]
        )
    ):
        at = scores.at_N.tolist()
        assert at == expected["expected.drafted.supervised"][k].nonzero()[:, 0].tolist()
        in_vocab = expected["expected.drafted.in_draft_vocab"][k]
        assert scores.at_N[scores.enters_N].tolist() == in_vocab.nonzero()[:, 0].tolist()
        assert scores.right_N.tolist() == expected["expected.correct"][k][at].tolist()
        torch.testing.assert_close(
            scores.losses_N.double(), expected["expected.cross_entropy"][k][at], atol=2e-5, rtol=0
        )
        step_losses.append(scores.losses_N[scores.enters_N].mean().double())
        torch.testing.assert_close(step_losses[-1], expected["expected.drafted.loss"][k], atol=2e-5, rtol=0)
        assert scores.right_N.double().mean().item() == pytest.approx(expected["expected.drafted.accuracy"][k].item())
        right = dict(zip(at, scores.right_N.tolist(), strict=True))
        chained = right if chained is None else {t: chained[t] and right[t] for t in right}
        share = sum(chained.values()) / len(chained)
        assert share == pytest.approx(expected["expected.drafted.chained_accuracy"][k].item())
    total = sum(0.8**k * loss for k, loss in enumerate(step_losses)) / sum(0.8**k for k in range(4))
    torch.testing.assert_close(total, expected["expected.drafted.total_loss"][0], atol=2e-5, rtol=0)


def random_sample(generator: torch.Generator, shape: DrafterShape, head: torch.Tensor) -> Sample:
    """A ragged document with random turns: long, short (shorter than K), adjacent to either end, sometimes none."""
    length = int(torch.randint(2, 22, (), generator=generator))
    mask = torch.zeros(length, dtype=torch.long)
    at = int(torch.randint(1, 4, (), generator=generator))
    while at < length:
        turn = int(torch.randint(1, 9, (), generator=generator))
        mask[at : at + turn] = 1
        at += turn + int(torch.randint(1, 4, (), generator=generator))
    tokens = torch.randint(0, shape.vocab_size, (length,), generator=generator)
    aux = torch.randn(length, 3 * shape.hidden_size, generator=generator, dtype=torch.float64)
    last = torch.randn(length, shape.hidden_size, generator=generator, dtype=torch.float64) * 3
    return make_sample(tokens, mask, aux, last, head)


def fast_loss(
    drafter: Drafter,
    samples: list[Sample],
    embedding: torch.Tensor,
    head: torch.Tensor,
    steps: int,
    everywhere: bool = False,
) -> tuple[torch.Tensor, list[dict[int, bool]]]:
    """Total loss and what is right; gradients in `.grad`."""
    pack = make_pack(samples, steps, everywhere=everywhere).to(torch.device("cpu"), embedding.dtype)
    counted = loss_weights(entering_counts(pack, drafter.t2d), 0.8).to(embedding.dtype)
    weights = Weights(drafter, embedding.dtype)
    scores = train_pack(weights, pack, embedding, head[drafter.target_ids], counted)
    total = sum((s.losses_N[s.enters_N].sum() * w for s, w in zip(scores, counted, strict=True)), torch.zeros(()))
    right = [dict(zip(s.at_N.tolist(), s.right_N.tolist(), strict=True)) for s in scores]
    return total, right


@pytest.mark.parametrize("seed", range(12))
def test_loss_and_gradients_equal_the_loop_over_positions(seed: int) -> None:
    shape = tiny_shape(hidden=16, vocab=40, draft_vocab=(24, 40)[seed % 2])
    drafter = tiny_drafter(shape, seed=seed).double()
    assert_equal_to_loops(plain_layer(drafter, theta=10000.0), seed, steps=1 + seed % 5)


def assert_equal_to_loops(layer: SlowLayer, seed: int, steps: int) -> None:
    """Losses, gradients and what is right of the layer's drafter: positions that count, all positions, 32 bits."""
    generator = torch.Generator().manual_seed(seed)
    drafter, shape = layer.drafter, layer.shape
    embedding = torch.randn(40, 16, generator=generator, dtype=torch.float64)
    head = torch.randn(40, 16, generator=generator, dtype=torch.float64)
    samples = [random_sample(generator, shape, head) for _ in range(4)]

    slow = slow_unroll(layer, samples, embedding, head, steps)
    slow_total = slow.total(steps, 0.8)
    slow_gradients = torch.autograd.grad(slow_total, list(drafter.parameters()), allow_unused=True)
    cases = ((torch.float64, False, 1e-9), (torch.float64, True, 1e-9), (torch.float32, False, 1e-3))
    for dtype, everywhere, tolerance in cases:
        twin = Drafter(shape).to(dtype)
        twin.load_state_dict(drafter.state_dict())
        total, right = fast_loss(twin, samples, embedding.to(dtype), head.to(dtype), steps, everywhere)
        assert total.item() == pytest.approx(slow_total.item(), rel=max(tolerance, 1e-6))
        for (name, fast), reference in zip(twin.named_parameters(), slow_gradients, strict=True):
            assert reference is not None and fast.grad is not None, name
            scale = reference.abs().max().clamp(min=1e-12)
            assert ((fast.grad.double() - reference).abs().max() / scale) < tolerance, (name, dtype, everywhere)
        starts = [0]
        for sample in samples:
            starts.append(starts[-1] + len(sample.input_ids))
        for k in range(steps):
            expected = {starts[d] + t: v for (d, step, t), v in sorted(slow.right.items()) if step == k}
            assert right[k] == expected


def test_positions_that_count_follow_the_rule() -> None:
    rng = random.Random(0)
    masks = ["0111110", "0001", "01", "0110110111011110", "00000", "0111111111", "1", "0", "1111", "1111"]
    masks += ["".join(rng.choices("01", weights=(1, 4), k=rng.randint(1, 20))) for _ in range(300)]
    bits = [int(c) for c in "".join(masks)]
    ends = [end for mask, end in zip(masks, accumulate(map(len, masks)), strict=True) for _ in mask]
    depth = iter(counting_depth(np.array(bits), np.array(ends)).tolist())
    for mask in masks:
        alone = [int(c) for c in mask]
        for t in range(len(alone)):
            assert next(depth) == sum(counts(alone, t, k) for k in range(len(alone)))


def test_a_pack_equals_its_documents_alone() -> None:
    generator = torch.Generator().manual_seed(5)
    shape = tiny_shape(hidden=16, vocab=40, draft_vocab=24)
    drafter = tiny_drafter(shape).double()
    embedding = torch.randn(40, 16, generator=generator, dtype=torch.float64)
    head = torch.randn(40, 16, generator=generator, dtype=torch.float64)
    samples = [random_sample(generator, shape, head) for _ in range(5)]
    weights = Weights(drafter, torch.float64)
    packed = Unroll(weights, make_pack(samples, 3), embedding).outputs
    alone = [Unroll(weights, make_pack([s], 3), embedding).outputs for s in samples]
    for k in range(3):
        rows = torch.cat([outputs[k] for outputs in alone])
        torch.testing.assert_close(packed[k], rows, atol=1e-12, rtol=0)
