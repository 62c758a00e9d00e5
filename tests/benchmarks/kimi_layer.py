"""One mixture-of-experts layer of Kimi-K2.5's true size with random weights in 4 bits: tokens a second, and memory.

    python -m tests.benchmarks.kimi_layer --device cuda --tokens 8192 16384 32768

Routed experts stay packed (groups of 32) and are unpacked a few at a time, as `target/packed.py` does in extraction; attention,
shared expert and router are in bfloat16. From the time of a layer follows an estimate for all 61 in a pipeline over GPUs: a
micro-batch leaves it as often as its slowest GPU takes one in.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ray_eagle.target.packed import PackedExperts, packing_of

KIMI = {
    "vocab_size": 163840, "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
    "num_hidden_layers": 1, "first_k_dense_replace": 0, "n_routed_experts": 384, "n_shared_experts": 1,
    "num_experts_per_tok": 8, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.827, "norm_topk_prob": True,
    "num_attention_heads": 64, "num_key_value_heads": 64, "q_lora_rank": 1536, "kv_lora_rank": 512,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "max_position_embeddings": 32768,
    "rope_theta": 50000.0, "hidden_act": "silu",
}  # fmt: skip
LAYERS, MEASURED = 61, 3165
"""Of the whole model, and the tokens a second that the founding team measured on 8 GPUs."""
GROUP = 32
SMALL = {"hidden_size": 256, "moe_intermediate_size": 64, "n_routed_experts": 16, "vocab_size": 512,
         "intermediate_size": 256, "q_lora_rank": 64, "kv_lora_rank": 64, "num_attention_heads": 4,
         "num_key_value_heads": 4}  # fmt: skip
"""To try the script without a GPU."""


def make_layer(shape: dict[str, Any], device: torch.device) -> tuple[Any, Any]:
    """A decoder layer with packed experts, and its model's rotary embedding."""
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer, DeepseekV3RotaryEmbedding

    config = DeepseekV3Config(**shape)
    config._attn_implementation, config._experts_implementation = "sdpa", "grouped_mm"
    packing = packing_of(
        {"quantization_config": {"quant_method": "compressed-tensors", "format": "pack-quantized",
                                 "config_groups": {"group_0": {"weights": {"num_bits": 4}}}}}, Path())  # fmt: skip
    assert packing is not None
    with torch.device("meta"):
        layer = DeepseekV3DecoderLayer(config, 0).to(torch.bfloat16).eval()
    layer.mlp.experts = PackedExperts(layer.mlp.experts, packing)
    layer.to_empty(device=device)
    for name, tensor in [*layer.named_parameters(), *layer.named_buffers()]:
        if tensor.dim() > 1:
            tensor.data.normal_(std=0.02)
        else:
            tensor.data.fill_(1.0 if "norm" in name else 0.0)

    def take(name: str, rows: int, columns: int) -> tuple[Tensor, Tensor]:
        packed = torch.randint(-(2**31), 2**31 - 1, (rows, columns // 8), dtype=torch.int32, device=device)
        return packed, torch.full((rows, columns // GROUP), 0.005, dtype=torch.bfloat16, device=device)

    layer.mlp.experts.fill(take)
    return layer, DeepseekV3RotaryEmbedding(config).to(device)


def seconds_of(layer: Any, rotary: Any, tokens: int, length: int, hidden: int, device: torch.device) -> float:
    """Best of three passes over samples of one length."""
    x = torch.randn(tokens // length, length, hidden, device=device, dtype=torch.bfloat16)
    positions = torch.arange(length, device=device)[None]
    around = rotary(x, positions)
    best = float("inf")
    for _ in range(3):
        _wait(device)
        began = time.perf_counter()
        with torch.inference_mode():
            layer(x, position_embeddings=around, position_ids=positions)
        _wait(device)
        best = min(best, time.perf_counter() - began)
    return best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 16384, 32768])
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--small", action="store_true", help="a small shape, to try the script on a CPU")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    shape = KIMI | (SMALL if arguments.small else {})
    layer, rotary = make_layer(shape, device)
    experts = layer.mlp.experts
    held = sum(t.nbytes for t in (*experts.gate_up, *experts.down))
    print(f"experts: {held / 2**30:.2f} GiB packed, {held * 16 / 4.5 / 2**30:.2f} GiB in bfloat16")
    whole = f"{LAYERS} layers on {arguments.gpus} GPUs, tokens/s"
    print(
        f"| tokens a pass | ms a layer | peak GiB above the layer | {whole} | of {MEASURED:,} |\n|---|---|---|---|---|"
    )
    for tokens in arguments.tokens:
        base = torch.cuda.memory_allocated() if device.type == "cuda" else 0
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        seconds = seconds_of(layer, rotary, tokens, min(arguments.length, tokens), shape["hidden_size"], device)
        peak = (torch.cuda.max_memory_allocated() - base) / 2**30 if device.type == "cuda" else 0.0
        slowest = -(-LAYERS // arguments.gpus)
        rate = tokens / (seconds * slowest)
        print(f"| {tokens:,} | {seconds * 1e3:.1f} | {peak:.2f} | {rate:,.0f} | {rate / MEASURED:.1f}x |", flush=True)


if __name__ == "__main__":
    main()
