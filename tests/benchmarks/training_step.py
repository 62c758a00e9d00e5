"""Time and memory of one training step on one GPU, without Ray: ours, and the peers that can be imported.

    python tests/benchmarks/training_step.py --shape llama-8b --unroll 3 7 --share 1.0 0.5 --fp8 --peers

Random packed documents, float32 masters and AdamW for everyone, each with its own optimizer; data lies on the GPU. Peak memory
is also given above parameters, gradients, optimizer state and frozen tables. MFU counts the products of the positions that
a tool computes, against --tflops.
"""

import argparse
import gc
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))

from ray_eagle.drafter.checkpoint import load_drafter
from ray_eagle.drafter.shape import DrafterShape
from ray_eagle.drafter.start import random_drafter
from ray_eagle.hidden_states.schema import Sample
from ray_eagle.training.losses import entering_counts, loss_weights
from ray_eagle.training.optimizer import clip_and_step, make_optimizer
from ray_eagle.training.packing import Pack, make_pack
from ray_eagle.training.pointwise import PLAIN, compiled
from ray_eagle.training.unroll import train_pack
from ray_eagle.training.weights import Weights


@dataclass(frozen=True)
class Shape:
    """Of a drafter and its batch."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    drafts: int
    documents: int
    length: int


SHAPES = {
    "llama-8b": Shape(4096, 14336, 32, 8, 128, 128256, 32000, 4, 2048),
    "kimi": Shape(7168, 18432, 64, 64, 128, 163840, 32000, 2, 2048),
    "tiny": Shape(64, 128, 4, 2, 16, 512, 256, 4, 64),
}


@dataclass(frozen=True)
class Batch:
    """The same random documents for every tool."""

    tokens_BT: Tensor
    mask_BT: Tensor
    """bool: the assistant's tokens, the end of each document."""
    aux_BTC: Tensor
    last_BTH: Tensor
    """After the final norm."""
    embedding_VH: Tensor
    head_VH: Tensor


@dataclass(frozen=True)
class Running:
    """A tool ready to step, and the tensors that it must keep between steps."""

    step: Callable[[], object]
    fixed: Callable[[], list[Tensor]]
    flops: float


def random_batch(shape: Shape, share: float, device: torch.device, dtype: torch.dtype) -> Batch:
    torch.manual_seed(0)
    size = (shape.documents, shape.length)
    mask_BT = torch.zeros(size, dtype=torch.bool, device=device)
    mask_BT[:, round((1 - share) * shape.length) :] = True

    def states(*more: int) -> Tensor:
        return torch.randn(*more, device=device, dtype=dtype)

    return Batch(
        torch.randint(0, shape.drafts, size, device=device), mask_BT,
        states(*size, 3 * shape.hidden), states(*size, shape.hidden),
        states(shape.vocab, shape.hidden), states(shape.vocab, shape.hidden) * 0.02,
    )  # fmt: skip


def our_step(
    shape: Shape,
    batch: Batch,
    steps: int,
    fp8: bool = False,
    everywhere: bool = False,
    compiles: bool = True,
    start: Path | None = None,
) -> Running:
    """Ray Eagle's training core, as `Trainer` runs it. The draft vocabulary is the lowest ids."""
    device, dtype = batch.aux_BTC.device, batch.aux_BTC.dtype
    drafter = load_drafter(start) if start else random_drafter(
        DrafterShape(
            hidden_size=shape.hidden, intermediate_size=shape.intermediate, num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads, head_dim=shape.head_dim, vocab_size=shape.vocab,
            draft_vocab_size=shape.drafts, aux_layers=(1, 2, 3),
        ), 0,
    )  # fmt: skip
    drafter.to(device)
    drafter.inverse_frequencies = drafter.inverse_frequencies.to(device)
    weights = Weights(drafter, dtype, eight_bits=fp8, pointwise=compiled() if compiles else PLAIN)
    optimizer = make_optimizer(drafter, lr=1e-4)
    draft_head = batch.head_VH[: shape.drafts].clone()
    samples = []
    for tokens, mask, aux, last in zip(batch.tokens_BT, batch.mask_BT, batch.aux_BTC, batch.last_BTH, strict=True):
        last = last[:-1][mask[1:]]
        top1 = (last @ batch.head_VH.T).argmax(-1)  # as capture stores it, over the whole vocabulary
        samples.append(
            Sample("", "", tokens.int(), mask.to(torch.uint8), aux, last, top1.int(), torch.zeros(len(last)))
        )
    host = [Sample(**{k: v.cpu() if isinstance(v, Tensor) else v for k, v in vars(s).items()}) for s in samples]
    pack = make_pack(host, steps, everywhere=everywhere).to(device, dtype)

    def step() -> Tensor:
        counted = loss_weights(entering_counts(pack, drafter.t2d), 0.8).float()
        train_pack(weights, pack, batch.embedding_VH, draft_head, counted)
        norm = clip_and_step(optimizer, 1e-4, 1.0)
        weights.refresh()
        return norm

    def fixed() -> list[Tensor]:
        state = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]
        parameters = list(drafter.parameters())
        frozen = [*drafter.buffers(), draft_head, batch.embedding_VH, batch.head_VH]
        # the peers read the batch itself, which stays on the GPU for all: a second copy is no one's need
        return [*parameters, *parameters, *state, *frozen, pack.aux_TC, pack.last_SH]

    return Running(step, fixed, count_flops(shape, pack))


def count_flops(shape: Shape, pack: Pack) -> float:
    """Of the products of one step, forward and backward; two a multiplication."""
    h, wide = shape.hidden, shape.heads * shape.head_dim
    keys = 2 * shape.kv_heads * shape.head_dim
    rest = wide * h + 3 * h * shape.intermediate
    tokens = len(pack.tokens_T)
    total = 2.0 * tokens * 3 * h * h + 3.0 * tokens * 2 * h * keys + len(pack.last_SH) * h * shape.drafts
    for k, index in enumerate(pack.steps):
        rows = len(index.at_N)
        total += 3.0 * rows * (2 * h * wide + (2 * h * keys if k else 0) + rest)
        total += 3.0 * len(index.scored_M) * h * shape.drafts
        pairs = sum((q1 - q0) * (k1 - k0) - (q1 - q0) ** 2 / 2 for q0, q1, k0, k1 in pack.spans.bounds)
        total += 3.5 * pairs * 2 * wide
    return 2 * total


def measure(name: str, make: Callable[[], Running], tokens: int, kept: int, arguments: argparse.Namespace) -> str:
    """One row of the table. `kept`: bytes of the batch, which every tool reads; what else is left from earlier rows is none's."""
    gc.collect()
    torch.cuda.empty_cache()
    left = (torch.cuda.memory_allocated() - kept) / 2**30
    running = make()
    try:
        for _ in range(arguments.warmup):
            running.step()
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(arguments.steps + 1)]
        events[0].record()
        for event in events[1:]:
            running.step()
            event.record()
        torch.cuda.synchronize()
        times = sorted(one.elapsed_time(other) / 1e3 for one, other in pairwise(events))
        median, peak = times[len(times) // 2], torch.cuda.max_memory_allocated() / 2**30 - left
        above = peak - sum(t.numel() * t.element_size() for t in running.fixed()) / 2**30
        share = running.flops / median / arguments.tflops / 1e12
        return f"| {name} | {tokens / median:,.0f} | {1e3 * median:.1f} | {1e3 * times[0]:.1f} | {peak:.2f} | {above:.2f} | {share:.0%} |"
    finally:
        del running
        torch._dynamo.reset()  # or one tool's compilations count against the next one's limit
        gc.collect()
        torch.cuda.empty_cache()


def tools(
    shape: Shape, share: float, steps: int, arguments: argparse.Namespace, batch: Batch
) -> Iterator[tuple[str, Callable[[], Running]]]:
    """Name and maker of each tool that was asked for."""
    yield "ray_eagle", lambda: our_step(shape, batch, steps, compiles=not arguments.eager, start=arguments.drafter)
    if arguments.everywhere:
        yield "ray_eagle, every position", lambda: our_step(shape, batch, steps, everywhere=True)
    if arguments.fp8:
        yield "ray_eagle, fp8", lambda: our_step(shape, batch, steps, fp8=True, compiles=not arguments.eager)
    if arguments.peers is not None:
        from tests.benchmarks import peers

        chosen = arguments.peers or ["speculators", "specforge"]

        full = make_pack(
            [
                Sample("", "", t.int().cpu(), torch.ones_like(t).cpu(), torch.zeros(len(t), 3), torch.zeros(len(t) - 1, 1), t[1:].int().cpu(), t)
                for t in batch.tokens_BT
            ],
            steps,
        )  # fmt: skip
        flops = count_flops(shape, full)
        if "speculators" in chosen:
            yield "speculators 0.9.0", lambda: peers.speculators_step(shape, batch, steps, flops)
        if "specforge" in chosen:
            yield "SpecForge 0.2.0", lambda: peers.specforge_step(shape, batch, steps, flops)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=["llama-8b"])
    parser.add_argument("--unroll", nargs="+", type=int, default=[3, 7])
    parser.add_argument("--share", nargs="+", type=float, default=[1.0, 0.5])
    parser.add_argument("--fp8", action="store_true")
    parser.add_argument("--everywhere", action="store_true", help="also ours without leaving out any position")
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    parser.add_argument("--peers", nargs="*", choices=("speculators", "specforge"), help="without a name: both")
    parser.add_argument("--drafter", type=Path, help="the folder that ours starts from; else random weights")
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--tflops", type=float, default=989.0, help="dense bf16 of the GPU, by its datasheet")
    arguments = parser.parse_args()
    device = torch.device("cuda")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print("| shape, K, share: tool | tokens/s | median ms | best ms | peak GiB | above fixed GiB | MFU |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name in arguments.shape:
        shape = SHAPES[name]
        for share in arguments.share:
            batch = random_batch(shape, share, device, torch.bfloat16)
            kept = sum(t.numel() * t.element_size() for t in vars(batch).values())
            for steps in arguments.unroll:
                for tool, make in tools(shape, share, steps, arguments, batch):
                    label = f"{name}, {steps}, {share}: {tool}"
                    try:
                        print(measure(label, make, shape.documents * shape.length, kept, arguments), flush=True)
                    except Exception as error:  # a peer that fails is a row too
                        print(f"| {label} | failed: {type(error).__name__}: {str(error)[:200]} |", flush=True)
                        traceback.print_exc(limit=-6, file=sys.stderr)
            del batch


if __name__ == "__main__":
    main()
