"""A drafter with latent attention (MLA): its attention against transformers, its training and drafting against loops."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding

from ray_eagle.config import DrafterConfig, TargetConfig
from ray_eagle.drafter.model import Drafter, rope_frequencies
from ray_eagle.drafter.shape import DrafterShape
from ray_eagle.drafter.start import new_shape, start_drafter
from ray_eagle.serving.reference import ReferenceEngine
from ray_eagle.target.loading import TargetFacts, read_facts
from ray_eagle.training import pointwise, weights
from ray_eagle.training.losses import entering_counts, loss_weights
from ray_eagle.training.optimizer import clip_and_step, make_optimizer
from ray_eagle.training.packing import make_pack
from ray_eagle.training.unroll import train_pack
from ray_eagle.training.weights import Weights
from tests.slow_unroll import SlowLayer, plain_layer
from tests.tiny import VOCAB, tiny_deepseek_v3, tiny_drafter, tiny_latent_shape
from tests.unit.test_reference_engine import Recording, prompts, states
from tests.unit.test_unroll import assert_equal_to_loops, make_sample, random_sample

BETAS = {"beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": 64}
YARN = {"rope_type": "yarn", "rope_theta": 50000.0, "factor": 16.0, **BETAS, "mscale": 1.0, "mscale_all_dim": 0.7}
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "yarn": YARN,
    "yarn without mscale": {key: value for key, value in YARN.items() if "mscale" not in key},
}
STEPS = 3


@pytest.mark.parametrize("rank", [12, None])
@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES.keys())
def test_attention_equals_that_of_transformers(rope: dict[str, Any], rank: int | None) -> None:
    shape = tiny_latent_shape(q_lora_rank=rank, rope=rope).model_copy(update={"rms_norm_eps": 1e-6})
    drafter, latent = tiny_drafter(shape, seed=1), shape.latent
    assert latent
    config = DeepseekV3Config(
        hidden_size=2 * shape.hidden_size,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=512,
        rope_parameters=dict(rope),
        attn_implementation="eager",
        **latent.model_dump(),
    )
    theirs: Any = DeepseekV3Attention(config, 0)
    theirs.o_proj = nn.Linear(4 * latent.v_head_dim, shape.hidden_size, bias=False)
    theirs.load_state_dict(drafter.midlayer.self_attn.state_dict())
    x_T2 = torch.randn(40, 2 * shape.hidden_size, generator=torch.Generator().manual_seed(2))
    positions = torch.arange(40) + 100
    rotary = DeepseekV3RotaryEmbedding(config)(x_T2, positions[None])
    unseen = torch.full((40, 40), float("-inf")).triu(1)
    expected = theirs(x_T2[None], rotary, unseen[None, None])[0][0]

    queries, (keys, values) = drafter.queries(x_T2, positions), drafter.keys_values(x_T2, positions)
    q, k, v = (x.transpose(0, 1)[None] for x in (queries, keys, values))
    attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=shape.softmax_scale)[0].transpose(0, 1)
    torch.testing.assert_close(drafter.midlayer.self_attn.o_proj(attended.flatten(1)), expected, rtol=0, atol=2e-4)


def slow_layer(drafter: Drafter) -> SlowLayer:
    """With the drafter's own frequencies (which transformers judges above), and DeepSeek's scale written out."""
    rope, (frequencies, size) = drafter.shape.rope_parameters, rope_frequencies(drafter.shape)
    more = 0.1 * rope.get("mscale_all_dim", 0.0) * math.log(rope.get("factor", 1.0)) + 1.0
    return SlowLayer(drafter, frequencies.tolist(), size, more**2 / math.sqrt(drafter.shape.head_dim))


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_loss_and_gradients_equal_the_loop_over_positions(
    seed: int, padded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with values as wide as keys, zeros at their end, which flash attention needs."""
    monkeypatch.setattr(weights, "flash_runs", lambda *_: padded)
    rope, rank = list(ROPES.values())[seed % 2], (12, None)[seed // 2]
    shape = tiny_latent_shape(q_lora_rank=rank, rope=rope, hidden=16, vocab=40, draft_vocab=24)
    drafter = tiny_drafter(shape, seed=seed).double()
    layer = slow_layer(drafter) if seed % 2 else plain_layer(drafter, theta=10000.0)
    assert_equal_to_loops(layer, seed, steps=2 + seed % 3)


def gradients(drafter: Drafter, dtype: torch.dtype, **options: Any) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    embedding, head = (torch.randn(40, 16, generator=generator, dtype=torch.float64).to(dtype) for _ in range(2))
    samples = [random_sample(generator, drafter.shape, head.double()) for _ in range(6)]
    pack = make_pack(samples, STEPS).to(torch.device("cpu"), dtype)
    counted = loss_weights(entering_counts(pack, drafter.t2d), 0.8).to(torch.promote_types(dtype, torch.float32))
    twin = Drafter(drafter.shape).to(torch.promote_types(dtype, torch.float32))
    twin.load_state_dict(drafter.state_dict())
    train_pack(Weights(twin, dtype, **options), pack, embedding, head[twin.target_ids], counted)
    return {name: parameter.grad.double() for name, parameter in twin.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize(("eight_bits", "least"), [(False, 0.99), (True, 0.9)])
def test_sixteen_and_eight_bits_keep_the_direction_of_every_gradient(eight_bits: bool, least: float) -> None:
    drafter = tiny_drafter(tiny_latent_shape(rope=YARN, hidden=16, vocab=40, draft_vocab=24), seed=5)
    exact = gradients(drafter, torch.float64)
    rounded = gradients(drafter, torch.bfloat16, eight_bits=eight_bits)
    assert exact.keys() == rounded.keys() == dict(drafter.named_parameters()).keys()
    for name, gradient in exact.items():
        assert F.cosine_similarity(gradient.flatten(), rounded[name].flatten(), dim=0) > least, name


def test_compiled_functions_equal_the_plain_ones() -> None:
    torch._dynamo.reset()
    drafter = tiny_drafter(tiny_latent_shape(rope=YARN, hidden=16, vocab=40, draft_vocab=24), seed=3)
    plain = gradients(drafter, torch.float64)
    fast = gradients(drafter, torch.float64, pointwise=pointwise.compiled("aot_eager"))
    for name, gradient in plain.items():
        torch.testing.assert_close(fast[name], gradient, rtol=1e-9, atol=1e-12, msg=name)


# --- a target with latent attention, and a drafter trained for it ---------------------------------------------------


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, TargetFacts]:
    folder = tiny_deepseek_v3(tmp_path_factory.mktemp("latent") / "target")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model, read_facts(TargetConfig(path=str(folder)))


def acceptance(model: Any, drafter: Drafter) -> float:
    """Of greedy answers to the prompts that it was trained on."""
    engine = ReferenceEngine(model, [], drafter)
    passes = [one for prompt in prompts(6, seed=4) for one in engine.speculate(prompt, 32, STEPS).passes]
    return 1 + sum(one.accepted for one in passes) / len(passes)


@pytest.fixture(scope="module")
def trained(target: tuple[Any, TargetFacts]) -> tuple[float, Drafter]:
    """Its acceptance length before, and the drafter after 160 steps on the target's own answers."""
    model, facts = target
    shape = new_shape(DrafterConfig(architecture="mla"), facts, VOCAB)
    assert (shape.latent, shape.rope_parameters) == (facts.latent, facts.rope)
    ids = torch.zeros(VOCAB, dtype=torch.int64), torch.ones(VOCAB, dtype=torch.bool)
    drafter = start_drafter(DrafterConfig(architecture="mla"), facts, *ids, seed=1)
    before = acceptance(model, drafter)
    embedding, head = model.get_input_embeddings().weight.detach(), model.lm_head.weight.detach()
    engine, samples = ReferenceEngine(model, []), []
    for prompt in prompts(6, seed=4):
        text = prompt + engine.plain(prompt, 40).tokens
        mask = torch.tensor([0] * len(prompt) + [1] * (len(text) - len(prompt)))
        with torch.no_grad():
            last = model(input_ids=torch.tensor([text]), output_hidden_states=True).hidden_states[-1][0]
        samples.append(make_sample(torch.tensor(text), mask, states(model, text, shape.aux_layers), last, head))
    pack, copies = make_pack(samples, STEPS), Weights(drafter, torch.float32)
    optimizer = make_optimizer(drafter, lr=1e-2)
    counted = loss_weights(entering_counts(pack, drafter.t2d), 0.8).float()
    for _ in range(160):
        train_pack(copies, pack, embedding, head, counted)
        clip_and_step(optimizer, 1e-2, 1.0)
        copies.refresh()
    return before, drafter.eval()


def test_training_raises_the_acceptance(target: tuple[Any, TargetFacts], trained: tuple[float, Drafter]) -> None:
    before, drafter = trained
    after = acceptance(target[0], drafter)
    assert before < 1.5 < 2.0 < after, (before, after)


def test_drafts_equal_a_recomputation_without_caches(
    target: tuple[Any, TargetFacts], trained: tuple[float, Drafter]
) -> None:
    """Every pass: the drafted tokens and logits of loops over positions and heads, from the target's states."""
    model, drafter = target[0], trained[1]
    recording, exact = Recording(drafter.shape), Drafter(drafter.shape).double()
    for copy in (recording, exact):
        copy.load_state_dict(drafter.state_dict())
    layer, embedding = slow_layer(exact), model.get_input_embeddings().weight.detach().double()
    engine, accepted = ReferenceEngine(model, [], recording), set()
    for prompt in prompts(4, seed=8)[1:3] + prompts(6, seed=4)[:1]:
        recording.given = []
        made = engine.speculate(prompt, 12, STEPS)
        text = prompt + made.tokens
        aux_TC = states(model, text, drafter.shape.aux_layers).double()
        for number, verify in enumerate(made.passes):
            expected = slow_chain(layer, aux_TC, text, verify.start, embedding)
            assert verify.drafted == [token for token, _ in expected]
            for k, (_, logits) in enumerate(expected):
                found = recording.given[number * STEPS + k].double()
                torch.testing.assert_close(found, logits, rtol=1e-3, atol=1e-3)
            accepted.add(verify.accepted)
    assert len(accepted) > 1, "drafts were refused, and taken"


def slow_chain(
    layer: SlowLayer, aux_TC: Tensor, text: list[int], t: int, embedding: Tensor
) -> list[tuple[int, Tensor]]:
    """Tokens and logits that are drafted at position t, everything computed anew."""
    fused = [layer.drafter.fc.weight @ aux_TC[j] for j in range(t + 1)]
    inputs = [layer.input(embedding[text[j + 1]], fused[j]) for j in range(t + 1)]
    seen = [layer.keys_values(x, j) for j, x in enumerate(inputs)]
    hidden, x, drafted = fused[t], inputs[t], []
    for k in range(STEPS):
        if k:
            x = layer.input(embedding[drafted[-1][0]], hidden)
            seen.append(layer.keys_values(x, t + k))
        hidden = layer.output(hidden, x, t + k, seen)
        logits = layer.logits(hidden).detach()
        drafted.append((int(layer.drafter.target_ids[int(logits.argmax())]), logits))
    return drafted


def test_it_starts_with_the_targets_own_attention(target: tuple[Any, TargetFacts]) -> None:
    model, facts = target
    settings = DrafterConfig(architecture="mla", intermediate_size=48)
    ids = torch.zeros(VOCAB, dtype=torch.int64), torch.ones(VOCAB, dtype=torch.bool)
    drafter = start_drafter(settings, facts, *ids, seed=1)
    theirs, ours = model.model.layers[-1].self_attn.state_dict(), drafter.midlayer.self_attn.state_dict()
    assert theirs.keys() == ours.keys()
    for name, tensor in ours.items():
        reads_input = name in ("q_a_proj.weight", "kv_a_proj_with_mqa.weight")
        assert torch.equal(tensor[:, facts.hidden_size :] if reads_input else tensor, theirs[name]), name


def test_latent_shape_has_the_widths_of_the_paper() -> None:
    """DeepSeek-V3's own: 128 + 64 wide queries and keys, values of 128."""
    shape = DrafterShape.model_validate(
        tiny_latent_shape().model_dump()
        | {"num_attention_heads": 128, "num_key_value_heads": 128, "head_dim": 192, "hidden_size": 7168}
        | {"latent": dict(zip(("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
                              (1536, 512, 128, 64, 128), strict=True))}
    )  # fmt: skip
    sizes = {name.split(".")[2]: size for name, size in shape.tensors().items() if "self_attn" in name}
    assert sizes["kv_b_proj"] == (32768, 512) and sizes["q_b_proj"] == (24576, 1536)
    assert sizes["kv_a_proj_with_mqa"] == (576, 14336) and sizes["o_proj"] == (7168, 16384)
    assert (shape.value_dim, shape.rotated_dim) == (128, 64)
