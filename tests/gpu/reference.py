"""SGLang's answers beside the reference engine's, same drafter and prompts: python3 -m tests.gpu.reference PROBE.json DRAFTER -c tests/gpu/path.yaml

PROBE.json: what a probe with the sglang engine wrote. Decodes the first of its prompts again with the reference engine, here
(`--cpu` needs no GPU; `--dtype float32` answers bit for bit like plain decoding), and prints the share of equal answers and the
marginal acceptance of both by position, with 95 % intervals over prompts.
"""

import argparse
import json
from pathlib import Path

import numpy as np

from ray_eagle.config import ServeConfig
from ray_eagle.probing.acceptance import acceptance, bootstrap_ratio
from ray_eagle.probing.stage import probe_prompts
from ray_eagle.serving.generation import complete_passes
from ray_eagle.serving.reference import load_engine
from ray_eagle.settings import load_config


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("probe", type=Path)
    parser.add_argument("drafter", type=Path)
    parser.add_argument("-c", "--config", default="tests/gpu/path.yaml")
    parser.add_argument("--target", help="instead of the config's")
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--cpu", action="store_true")
    arguments = parser.parse_args()
    served = json.loads(arguments.probe.read_text())["served"]
    words = ["--target.path", arguments.target] if arguments.target else []
    config = load_config(arguments.config, None, words).config
    settings = ServeConfig(dtype=arguments.dtype, cpus=1, gpus=0 if arguments.cpu else 1)
    engine, facts, _ = load_engine(config.target, settings, arguments.drafter, None, 0)
    prompts = {prompt.id: prompt.input_ids for prompt in probe_prompts(config, facts)[0]}

    sides = {"sglang": served["rows"][: arguments.prompts], "reference": []}
    for row in sides["sglang"]:
        ids = prompts[row["id"]]
        made = engine.speculate(ids, served["max_new_tokens"], served["steps"])
        accepted = [p.accepted for p in complete_passes(made, len(ids), served["steps"])]
        sides["reference"].append({"tokens": made.tokens, "accepted": accepted})
        print(f"\r{len(sides['reference'])} of {len(sides['sglang'])}", end="", flush=True)
    pairs = list(zip(*sides.values(), strict=True))
    equal = {name: sum(a[name] == b[name] for a, b in pairs) for name in ("tokens", "accepted")}
    print(f"\rof {len(pairs)} answers {equal['tokens']} are equal, {equal['accepted']} with the same passes")
    for name, rows in sides.items():
        found = acceptance([r["accepted"] for r in rows], ["all"] * len(rows), steps=served["steps"])
        print(f"{name}: {found.verify_passes} passes, tau {found.acceptance_length:.3f} {_rounded(found.interval)}")
        for k in range(1, served["steps"] + 1):
            hits = np.array([sum(j >= k for j in r["accepted"]) for r in rows], np.float64)
            passes = np.array([len(r["accepted"]) for r in rows], np.float64)
            interval = bootstrap_ratio(hits, passes, confidence=0.95, resamples=2000, seed=0)
            print(f"  at least {k}: {found.marginal[k - 1]:.3f} {_rounded(interval)}")


def _rounded(interval: tuple[float, float]) -> list[float]:
    return [round(end, 3) for end in interval]


if __name__ == "__main__":
    main()
