"""Tokens a second of embedded generation on the example model, beside transformers' own padded `generate` at the same batch.

    python tests/benchmarks/generation.py --slots 32 --prompts 128 --max-new-tokens 128

Both answer the same shipped prompts greedily. transformers takes them in the order of the file, `--slots` at a time, with its
dynamic cache; ours takes them by length and gives each finished row's place to the next prompt. Prompts' tokens are not
counted, the time of their prefill is.
"""

import argparse
import sys
import time
from collections import deque
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from ray_eagle.config import GenerateConfig
from ray_eagle.conversations.prompts import load_prompts
from ray_eagle.conversations.template import render_prompt
from ray_eagle.settings import load_config
from ray_eagle.target.attention import group_queries
from ray_eagle.target.generation import Decoder, Request, eos_ids
from ray_eagle.target.loading import load_tokenizer, read_facts
from ray_eagle.target.stage import load_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="smollm2-cpu")
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--prompts", type=int, default=128)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    torch.set_num_threads(2)
    target = load_config(preset=arguments.preset).config.target
    facts = read_facts(target)
    tokenizer, model = load_tokenizer(facts, target), load_model(facts, target, torch.device(arguments.device))
    eos = eos_ids(model, tokenizer)
    chosen = load_prompts(GenerateConfig(limit=arguments.prompts))
    prompts = [render_prompt(tokenizer, p.turns[0], p.system) for p in chosen]
    limit, slots = arguments.max_new_tokens, arguments.slots

    @torch.inference_mode()
    def plain() -> int:
        model.set_attn_implementation(target.attention)
        made = 0
        for first in range(0, len(prompts), slots):
            batch = prompts[first : first + slots]
            width = max(map(len, batch))
            ids = torch.tensor([[eos[0]] * (width - len(p)) + p for p in batch], device=model.device)
            mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in batch], device=model.device)
            out = model.generate(
                ids, attention_mask=mask, max_new_tokens=limit, do_sample=False, eos_token_id=eos, pad_token_id=eos[0]
            )
            for row in out[:, width:].tolist():
                made += next((i + 1 for i, token in enumerate(row) if token in eos), len(row))
        return made

    def ours() -> int:
        group_queries(model)
        waiting = deque(Request(prompt) for prompt in sorted(prompts, key=len))
        return sum(
            len(answer.ids) for _, answer in Decoder(model, eos=eos, slots=slots, max_new_tokens=limit).run(waiting)
        )

    print("| | tokens | seconds | tokens/s |\n|---|---|---|---|")
    for _ in range(arguments.rounds):
        for name, function in (("transformers", plain), ("ray_eagle", ours)):
            began = time.perf_counter()
            made = function()
            seconds = time.perf_counter() - began
            print(f"| {name} | {made:,} | {seconds:.1f} | {made / seconds:.1f} |", flush=True)


if __name__ == "__main__":
    main()
