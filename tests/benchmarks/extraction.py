"""Extraction against the plain way, and two half-model stages against one whole model, on real GPUs.

    python -m tests.benchmarks.extraction model --model /dev/shm/llama-8b          # random weights, Llama-3.1-8B's shape
    python -m tests.benchmarks.extraction compare --model /dev/shm/llama-8b --out /dev/shm/states
    python -m tests.benchmarks.extraction stages --model /dev/shm/llama-8b --out /dev/shm/states        # two GPUs

The plain way is what public scripts do: padded batches of 32 in the order of the data, `output_hidden_states`, one
`torch.save` per sample. Ours is the product: a Ray actor (or a pipeline of them) that writes shards. Both write to the same
place, in one run, over samples of log-normal length (median 500, sigma 1, at most 4,096).
"""

import argparse
import json
import random
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ray_eagle.config import Config
from ray_eagle.hidden_states.actors import make_pool
from ray_eagle.hidden_states.plan import TokenSample, Unit, plan_units
from ray_eagle.hidden_states.schema import sample_id
from ray_eagle.run import Folder
from ray_eagle.target.loading import TargetFacts, read_facts

MEDIAN, SIGMA, LONGEST = 500, 1.0, 4096
PLAIN_BATCH = 32
SHAPE = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}


def make_model(folder: Path, layers: int) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**{**SHAPE, "num_hidden_layers": layers})
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        torch.set_default_dtype(torch.bfloat16)
        model = LlamaForCausalLM(config)
        torch.set_default_dtype(torch.float32)
    model.save_pretrained(folder, max_shard_size="2GB")


def make_samples(tokens: int, supervised: float, vocab: int) -> list[TokenSample]:
    rng = random.Random(0)
    samples: list[TokenSample] = []
    while tokens > 0:
        length = max(8, min(LONGEST, round(rng.lognormvariate(0, SIGMA) * MEDIAN)))
        ids = tuple(rng.choices(range(vocab), k=length))
        answer = max(1, round(length * supervised))
        mask = tuple([0] * (length - answer) + [1] * answer)
        samples.append(TokenSample(sample_id(list(ids), list(mask)), f"s{len(samples)}", "train", ids, mask))
        tokens -= length
    return samples


def matrix_rate() -> float:
    """FLOP/s of a large bf16 matrix product on random data, the fastest of three."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    best = 0.0
    for _ in range(4):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(20):
            a @ b
        torch.cuda.synchronize()
        best = max(best, 20 * 2 * 8192**3 / (time.perf_counter() - began))
    return best


def flops(samples: list[TokenSample], facts: TargetFacts) -> float:
    """Of a forward pass that computes only what counts: layers and causal attention everywhere, the head where supervised."""
    h, i, d = facts.hidden_size, facts.intermediate_size, facts.head_dim
    heads, groups = facts.num_attention_heads, facts.num_key_value_heads
    layer = 2 * (h * d * (2 * heads + 2 * groups) + 3 * h * i)
    total = 0.0
    for sample in samples:
        n = len(sample.input_ids)
        total += facts.layers * (n * layer + 2 * n * n * heads * d) + sample.teaching * 2 * h * facts.vocab_size
    return total


@torch.inference_mode()
def plain(model_folder: Path, samples: list[TokenSample], facts: TargetFacts, out: Path) -> dict[str, float]:
    """Padded batches, all hidden states, one file a sample."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.bfloat16, attn_implementation="sdpa")
    model = model.to("cuda").eval()
    out.mkdir(parents=True)

    def capture(batch: list[TokenSample], number: int) -> None:
        longest = max(len(s.input_ids) for s in batch)
        ids = torch.zeros(len(batch), longest, dtype=torch.long)
        attention = torch.zeros(len(batch), longest, dtype=torch.long)
        for row, sample in enumerate(batch):
            ids[row, : len(sample.input_ids)] = torch.tensor(sample.input_ids)
            attention[row, : len(sample.input_ids)] = 1
        output = model.model(ids.cuda(), attention_mask=attention.cuda(), output_hidden_states=True, use_cache=False)
        layers = [output.hidden_states[layer + 1] for layer in facts.aux_layers]
        for row, sample in enumerate(batch):
            n = len(sample.input_ids)
            item = {
                "input_ids": torch.tensor(sample.input_ids),
                "loss_mask": torch.tensor(sample.loss_mask),
                "aux_hidden_state": torch.cat([layer[row, :n] for layer in layers], dim=-1).cpu(),
                "hidden_state": output.last_hidden_state[row, :n].cpu(),
            }
            torch.save(item, out / f"data_{number}_{row}.ckpt")

    capture(samples[:PLAIN_BATCH], -1)  # warm
    torch.cuda.synchronize()
    began = time.perf_counter()
    for start in range(0, len(samples), PLAIN_BATCH):
        capture(samples[start : start + PLAIN_BATCH], start)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    written = sum(file.stat().st_size for file in out.glob("data_[0-9]*"))
    shutil.rmtree(out)
    return {
        "tokens": sum(len(s.input_ids) for s in samples),
        "seconds": seconds,
        "bytes": written,
        "peak_gib": torch.cuda.max_memory_reserved() / 2**30,
    }


def ours(config: Config, facts: TargetFacts, units: list[Unit], out: Path) -> dict[str, float]:
    """The product's own actors, timed from the moment when each has one unit behind it until the last is committed."""
    folder = Folder.at(out)
    folder.create()
    warm = min(2 * config.extract.actors, len(units) // 4)
    arrivals: list[tuple[float, Any]] = []
    for _, record in make_pool(config, facts, folder).run(units):
        arrivals.append((time.perf_counter(), record))
    counted = arrivals[warm:]
    shutil.rmtree(out)
    return {
        "tokens": sum(record.tokens for _, record in counted),
        "seconds": counted[-1][0] - arrivals[warm - 1][0],
        "bytes": sum(record.bytes for _, record in counted),
        "peak_gib": max(record.made_by["peak_bytes"] for _, record in arrivals) / 2**30,
    }


def extract_config(model: Path, **settings: Any) -> Config:
    extract = {"gpus": 1, "cpus": 6, "tokens_per_batch": 8192, "unit_mib": 512, "max_length": LONGEST} | settings
    return Config.model_validate(
        {"run": "/unused", "target": {"path": str(model), "dtype": "bfloat16"}, "extract": extract}
    )


def units_of(samples: list[TokenSample], config: Config, facts: TargetFacts) -> list[Unit]:
    return plan_units(
        samples,
        unit_bytes=config.extract.unit_mib * 2**20,
        hidden_size=facts.hidden_size,
        state_dtype=config.extract.state_dtype,
        seed=0,
    )


def touch(folder: Path, gib: int) -> None:
    """Have a virtual machine give the memory first: what is written next must not wait for it."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(gib):
        (folder / f"touch-{number}").write_bytes(b"\1" * 2**30)
    shutil.rmtree(folder)


def row(name: str, found: dict[str, float], total_flops: float | None = None, rate: float | None = None) -> str:
    speed = found["tokens"] / found["seconds"]
    share = f"{total_flops * speed / rate:6.1%}" if total_flops and rate else "      -"
    return (
        f"{name:<44}{speed:>10,.0f}{share:>10}{found['bytes'] / found['seconds'] / 1e9:>10.2f}"
        f"{found['bytes'] / found['tokens'] / 1e3:>10.1f}{found['peak_gib']:>10.1f}{found['tokens']:>12,.0f}"
    )


def header() -> str:
    columns = ["tokens/s", "of matmul", "GB/s", "kB/token", "peak GiB", "tokens"]
    return f"{'':<44}" + "".join(f"{c:>{12 if c == 'tokens' else 10}}" for c in columns)


def compare(model: Path, out: Path, tokens: int, plain_tokens: int) -> Iterator[str]:
    import ray

    facts = read_facts(extract_config(model).target)
    rate = matrix_rate()
    yield f"{torch.cuda.get_device_name()}, torch {torch.__version__}; bf16 matrix product {rate / 1e12:.0f} TFLOP/s"
    yield header()
    samples = make_samples(tokens, 0.7, facts.vocab_size)
    per_token = flops(samples, facts) / sum(len(s.input_ids) for s in samples)
    few = make_samples(plain_tokens, 0.7, facts.vocab_size)
    slow = plain(model, few, facts, out / "plain")
    yield row("plain: padded, torch.save", slow, per_token, rate)
    torch.cuda.empty_cache()
    ray.init("local", num_cpus=12, num_gpus=1, include_dashboard=False)
    for state_dtype in ("bfloat16", "float8"):
        config = extract_config(model, state_dtype=state_dtype)
        found = ours(config, facts, units_of(samples, config, facts), out / state_dtype)
        yield row(f"ours: packed, shards, {state_dtype}", found, per_token, rate)
        gain = found["tokens"] / found["seconds"] / (slow["tokens"] / slow["seconds"])
        yield f"  {gain:.2f}x the plain way"
    ray.shutdown()


def stages(model: Path, out: Path, tokens: int, dtypes: list[str]) -> Iterator[str]:
    import ray

    facts = read_facts(extract_config(model).target)
    samples = make_samples(tokens, 0.7, facts.vocab_size)
    ray.init("local", num_cpus=28, num_gpus=2, include_dashboard=False, object_store_memory=16 * 2**30)
    yield header()
    for state_dtype in dtypes:
        speeds = []
        for count in (1, 2):
            config = extract_config(model, stages=count, state_dtype=state_dtype, cpus=8)
            found = ours(config, facts, units_of(samples, config, facts), out / f"{count}")
            speeds.append(found["tokens"] / found["seconds"])
            yield row(f"{count} stage{'s' * (count > 1)} on {count} GPU{'s' * (count > 1)}, {state_dtype}", found)
        yield f"  two half-model stages: {speeds[1] / speeds[0]:.2f}x the whole model on one GPU"
    ray.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["model", "compare", "stages"])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--out", type=Path, default=Path("/dev/shm/states"))
    parser.add_argument("--tokens", type=int, default=900_000)
    parser.add_argument("--plain-tokens", type=int, default=200_000)
    parser.add_argument("--touch-gib", type=int, default=0, help="memory to touch first at --out")
    parser.add_argument("--dtypes", default="bfloat16,float8")
    given = parser.parse_args()
    if given.what == "model":
        make_model(given.model, given.layers)
        print(json.dumps(SHAPE))
        return
    touch(given.out, given.touch_gib)
    if given.what == "compare":
        lines = compare(given.model, given.out, given.tokens, given.plain_tokens)
    else:
        lines = stages(given.model, given.out, given.tokens, given.dtypes.split(","))
    for line in lines:
        print(line, flush=True)


if __name__ == "__main__":
    main()
