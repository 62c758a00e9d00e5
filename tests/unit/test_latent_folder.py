"""Folders of drafters with latent attention: what SGLang loads is what is written, and what is wrong with one is named."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file
from typer.testing import CliRunner

from ray_eagle.cli import app
from ray_eagle.config import DrafterConfig, TargetConfig
from ray_eagle.drafter.checkpoint import load_drafter, save_drafter
from ray_eagle.drafter.convert import convert
from ray_eagle.drafter.engines import parse_engine
from ray_eagle.drafter.files import WEIGHTS
from ray_eagle.drafter.start import new_shape, start_drafter
from ray_eagle.errors import CheckpointError, ConfigError, InputError
from ray_eagle.preflight.drafter import check_folder
from ray_eagle.target.loading import read_facts
from ray_eagle.target.sizes import latent_sizes, read_target
from tests.drafters import Damage, edit, kimi_config, llama_config, rename, retensor
from tests.tiny import VOCAB, tiny_drafter, tiny_latent_shape
from tests.unit.test_latent import ROPES, YARN

H, HEADS, RANK_Q, RANK, KEPT, TURNED, VALUE, MLP, D = 32, 4, 12, 10, 6, 4, 5, 96, 128
TENSORS: dict[str, list[int]] = {
    "fc.weight": [H, 3 * H],
    "midlayer.input_layernorm.weight": [H],
    "midlayer.hidden_norm.weight": [H],
    "midlayer.post_attention_layernorm.weight": [H],
    "midlayer.self_attn.q_a_proj.weight": [RANK_Q, 2 * H],
    "midlayer.self_attn.q_a_layernorm.weight": [RANK_Q],
    "midlayer.self_attn.q_b_proj.weight": [HEADS * (KEPT + TURNED), RANK_Q],
    "midlayer.self_attn.kv_a_proj_with_mqa.weight": [RANK + TURNED, 2 * H],
    "midlayer.self_attn.kv_a_layernorm.weight": [RANK],
    "midlayer.self_attn.kv_b_proj.weight": [HEADS * (KEPT + VALUE), RANK],
    "midlayer.self_attn.o_proj.weight": [H, HEADS * VALUE],
    "midlayer.mlp.gate_proj.weight": [MLP, H],
    "midlayer.mlp.up_proj.weight": [MLP, H],
    "midlayer.mlp.down_proj.weight": [H, MLP],
    "norm.weight": [H],
    "lm_head.weight": [D, H],
    "d2t": [D],
    "t2d": [VOCAB],
}
NEW, OLD = "sglang==0.5.23", "sglang==0.5.10"
LATENT_TARGET = {"model_type": "deepseek_v3", "kv_lora_rank": 16}


def latent_folder(folder: Path, *changes: Damage, **shape: Any) -> Path:
    save_drafter(tiny_drafter(tiny_latent_shape(**shape), seed=2), folder)
    for change in changes:
        change(folder)
    return folder


def config_of(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return content


@pytest.mark.parametrize("rank", [RANK_Q, None])
@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES.keys())
def test_what_is_saved_is_loaded(tmp_path: Path, rope: dict[str, Any], rank: int | None) -> None:
    shape = tiny_latent_shape(q_lora_rank=rank, rope=rope)
    drafter = tiny_drafter(shape, seed=4)
    save_drafter(drafter, tmp_path, torch.float32)
    loaded = load_drafter(tmp_path)
    assert loaded.shape == shape
    assert all(torch.equal(tensor, drafter.state_dict()[name]) for name, tensor in loaded.state_dict().items())
    x, positions = torch.randn(9, 2 * H, generator=torch.Generator().manual_seed(0)), torch.arange(9)
    assert torch.equal(loaded.queries(x, positions), drafter.queries(x, positions))
    assert all(
        torch.equal(*pair)
        for pair in zip(loaded.keys_values(x, positions), drafter.keys_values(x, positions), strict=True)
    )


def test_the_folder_is_the_one_that_sglang_loads(tmp_path: Path) -> None:
    config = config_of(latent_folder(tmp_path, rope=YARN))
    assert {name: list(tensor.shape) for name, tensor in load_file(tmp_path / WEIGHTS).items()} == TENSORS
    expected = {
        "architectures": ["Eagle3DeepseekV2ForCausalLM"],
        "model_type": "kimi_k2",
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "q_lora_rank": RANK_Q,
        "kv_lora_rank": RANK,
        "qk_nope_head_dim": KEPT,
        "qk_rope_head_dim": TURNED,
        "v_head_dim": VALUE,
        "rope_theta": 50000.0,
        "rope_scaling": {key: value for key, value in YARN.items() if key != "rope_theta"},
        "tie_word_embeddings": False,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4], "use_aux_hidden_state": True},
    }
    assert {key: config[key] for key in expected} == expected
    assert "head_dim" not in config, "transformers reads it as the rotated width"


def test_another_tools_folder_becomes_sglangs_and_stays_what_it_is(tmp_path: Path) -> None:
    ours = latent_folder(tmp_path / "ours", rope=YARN)
    other = latent_folder(
        tmp_path / "other",
        rename(lambda name: name.replace("midlayer.", "model.layers.0.")),
        edit(architectures=["DeepseekV3ForCausalLMEagle3"], model_type="deepseek_v3", head_dim=4, rope_parameters=None),
        rope=YARN,
    )
    assert load_drafter(other).shape == load_drafter(ours).shape
    wanted, config = load_file(ours / WEIGHTS), config_of(ours)
    for name, source in (("from ours", ours), ("from the other", other)):
        convert(source, tmp_path / name, "sglang")
        made = load_file(tmp_path / name / WEIGHTS)
        assert made.keys() == wanted.keys() and all(torch.equal(made[key], wanted[key]) for key in made)
        assert config_of(tmp_path / name) | config == config_of(tmp_path / name)


def test_speculators_has_no_such_format(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="all that speculators knows, found latent attention"):
        convert(latent_folder(tmp_path / "ours"), tmp_path / "to", "speculators")
    assert not (tmp_path / "to").exists()


def test_show_names_the_architecture(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["drafter", "show", str(latent_folder(tmp_path))])
    for words in (
        "one DeepSeek layer (latent attention)",
        "4 heads of 6 + 4 (rotated), values 5",
        "ranks 12 (queries)",
    ):
        assert words in result.stdout
    assert "not trainable" not in result.stdout
    shown = json.loads(CliRunner().invoke(app, ["drafter", "show", str(tmp_path), "--json"]).stdout)
    assert shown["shape"]["latent"]["kv_lora_rank"] == RANK


NAME = "midlayer.self_attn.kv_b_proj.weight"
WIDE = edit(rope_parameters=None, rope_scaling={"type": "linear", "factor": 2.0}, rope_theta=1e4)
LACKING = edit(rope_parameters=None, rope_scaling={"type": "yarn", "factor": 2.0}, rope_theta=1e4)
HALF = edit(
    rope_parameters=None,
    rope_theta=5e4,
    rope_scaling={"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64, "mscale": 0.7},
)
# name: (change, target, engine, level, words of one finding)
FAULTS: dict[str, tuple[Any, dict[str, Any], str | None, str, str]] = {
    "no kv_b_proj": (retensor(lambda t: t.pop(NAME)), {}, None, "error", f"missing ['{NAME}']"),
    "wrong rank": (edit(kv_lora_rank=8), {}, None, "error", "kv_a_layernorm.weight: |expected [8], found [10]"),
    "wrong value width": (edit(v_head_dim=6), {}, None, "error", "kv_b_proj.weight: |expected [48, 10], found [44, 10]"),
    "no rank": (edit(kv_lora_rank=None), {}, None, "error", "expected the key 'kv_lora_rank'"),
    "a rank of 0": (edit(kv_lora_rank=0), {}, None, "error", "kv_lora_rank: expected"),
    "an odd rotated width": (edit(qk_rope_head_dim=3), {}, None, "error", "qk_rope_head_dim: expected"),
    "values wider than keys": (edit(v_head_dim=11), {}, None, "error", "v_head_dim: expected|at most 10"),
    "queries without the rank they have": (edit(q_lora_rank=None), {}, None, "error", "q_proj.weight'], unknown ['midl"),
    "halves instead of pairs": (edit(rope_interleave=False), {}, None, "error", "rope_interleave: expected True"),
    "Llama by its config": (edit(architectures=["LlamaForCausalLMEagle3"]), {}, None, "error", "k_proj.weight'"),
    "a scaled RoPE that is no YaRN": (WIDE, {}, None, "error", "RoPE linear: SGLang and vLLM take"),
    "YaRN without its context": (LACKING, {}, None, "error", "needs original_max_position_embeddings"),
    "half of YaRN's scales": (HALF, {}, None, "warning", "expected both mscale and mscale_all_dim"),
    "an SGLang before it": (lambda f: None, {}, OLD, "error", "sglang 0.5.10 has no drafter with latent attention"),
    "vLLM's name in SGLang": (
        edit(architectures=["Eagle3DeepseekV3ForCausalLM"]), {}, NEW, "error", "does not know Eagle3DeepseekV3ForCausalLM",
    ),
    "names that SGLang skips": (rename(lambda n: f"model.{n}"), {}, NEW, "error", "skips model.* without a word"),
    "DeepSeek's model_type in vLLM": (edit(model_type="deepseek_v3"), {}, "vllm", "error", "own multi-token prediction"),
    "an option that vLLM has not": (
        lambda f: [
            c(f)
            for c in (edit(norm_before_fc=True), retensor(lambda t: t.update({"input_norm.weight": torch.ones(3 * H)})))
        ], {}, "vllm", "error", "norm_before_fc is on, which vllm does not know",
    ),
    "no MLA in the target": (lambda f: None, {"model_type": "llama", "kv_lora_rank": None}, NEW, "warning", "backend"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_is_found_and_named(tmp_path: Path, name: str) -> None:
    damage, target, engine, level, words = FAULTS[name]
    folder = latent_folder(tmp_path / "drafter")
    damage(folder)
    given = read_target(llama_config(tmp_path / "target", **(LATENT_TARGET | target)))
    findings = check_folder(folder, given, parse_engine(engine) if engine else None)
    found = [f for f in findings if f.level == level and all(part in f.message for part in words.split("|"))]
    assert found, findings
    assert found[0].fix or found[0].message.endswith(".")


def test_queries_without_a_rank_are_no_drafter_for_sglang(tmp_path: Path) -> None:
    folder = latent_folder(tmp_path / "drafter", q_lora_rank=None)
    target = read_target(llama_config(tmp_path / "target", **LATENT_TARGET))
    levels = {
        engine: {f.level for f in check_folder(folder, target, parse_engine(engine))} for engine in (NEW, "reference")
    }
    assert levels == {NEW: {"ok", "error"}, "reference": {"ok"}}


@pytest.mark.parametrize("engine", [None, NEW, "reference"])
@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES.keys())
def test_no_false_alarm(tmp_path: Path, rope: dict[str, Any], engine: str | None) -> None:
    folder = latent_folder(tmp_path / "drafter", rope=rope)
    target = read_target(llama_config(tmp_path / "target", **LATENT_TARGET))
    findings = check_folder(folder, target, parse_engine(engine) if engine else None)
    assert {finding.level for finding in findings} == {"ok"}, findings


# --- how one starts -------------------------------------------------------------------------------------------------


def test_training_starts_from_a_given_folder(tmp_path: Path, target_folder: Path) -> None:
    given = load_drafter(latent_folder(tmp_path))
    facts = read_facts(TargetConfig(path=str(target_folder), aux_layers=(1, 3, 4)))
    start = start_drafter(DrafterConfig(path=str(tmp_path)), facts, given.d2t, given.t2d, seed=1)
    assert start.shape == given.shape
    assert all(torch.equal(start.state_dict()[name], tensor) for name, tensor in given.state_dict().items())
    save_drafter(tiny_drafter(tiny_latent_shape(hidden=16)), tmp_path / "other")
    with pytest.raises(CheckpointError, match="another target: hidden_size"):
        start_drafter(DrafterConfig(path=str(tmp_path / "other")), facts, given.d2t, given.t2d, seed=1)


def test_a_target_without_latent_attention_needs_sizes(target_folder: Path) -> None:
    facts = read_facts(TargetConfig(path=str(target_folder)))
    assert facts.latent is None
    with pytest.raises(ConfigError, match=r"found no drafter.q_lora_rank, drafter.kv_lora_rank, .* \(llama\)"):
        new_shape(DrafterConfig(architecture="mla", v_head_dim=8), facts, 64)
    sizes = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
    shape = new_shape(DrafterConfig(architecture="mla", **sizes), facts, 64)
    assert shape.latent and shape.latent.model_dump() == sizes
    assert (shape.head_dim, shape.num_key_value_heads) == (12, facts.num_attention_heads)
    with pytest.raises(ConfigError, match=r"drafter.v_head_dim: .*at most 12, the width of a key, found 13"):
        new_shape(DrafterConfig(architecture="mla", **(sizes | {"v_head_dim": 13})), facts, 64)
    with pytest.raises(ValidationError, match="q_lora_rank: only latent attention has it; set architecture to mla"):
        DrafterConfig(q_lora_rank=8)


def test_a_scaled_rope_that_engines_do_not_know_here_is_left(target_folder: Path, tmp_path: Path) -> None:
    linear = {"rope_type": "linear", "rope_theta": 7e4, "factor": 4.0}
    target = llama_config(tmp_path, rope_parameters=linear, kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=4,
                          v_head_dim=8, q_lora_rank=8)  # fmt: skip
    facts = read_facts(TargetConfig(path=str(target)))
    assert new_shape(DrafterConfig(architecture="mla"), facts, 64).rope_parameters == {
        "rope_type": "default",
        "rope_theta": 7e4,
    }
    assert new_shape(DrafterConfig(), facts, 64).rope_parameters == linear


def test_a_latent_attention_of_another_kind_is_not_taken_for_one(tmp_path: Path) -> None:
    text = json.loads((kimi_config(tmp_path) / "config.json").read_text())["text_config"]
    assert latent_sizes(text) is None
    rest = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    found = latent_sizes(text | rest)
    assert found and (found.q_lora_rank, found.qk_head_dim) == (None, 192)
