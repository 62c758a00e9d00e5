"""Drafter folders as speculators writes them: the same drafter as its SGLang folder, or a refusal that says why."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig

from ray_eagle.config import DrafterConfig, TargetConfig
from ray_eagle.drafter.checkpoint import check_drafter, load_drafter, read_shape, save_drafter
from ray_eagle.drafter.files import WEIGHTS
from ray_eagle.drafter.model import Drafter
from ray_eagle.drafter.speculators import LLAMA_DEFAULTS
from ray_eagle.drafter.start import start_drafter
from ray_eagle.errors import CheckpointError
from ray_eagle.target.loading import read_facts
from ray_eagle.target.sizes import text_rope
from tests.tiny import VOCAB, tiny_drafter, tiny_shape

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
NAMES = {
    "fc.weight": "fc.weight",
    "midlayer.input_layernorm.weight": "layers.0.input_layernorm.weight",
    "midlayer.hidden_norm.weight": "layers.0.hidden_norm.weight",
    "midlayer.post_attention_layernorm.weight": "layers.0.post_attention_layernorm.weight",
    "midlayer.self_attn.q_proj.weight": "layers.0.self_attn.q_proj.weight",
    "midlayer.self_attn.k_proj.weight": "layers.0.self_attn.k_proj.weight",
    "midlayer.self_attn.v_proj.weight": "layers.0.self_attn.v_proj.weight",
    "midlayer.self_attn.o_proj.weight": "layers.0.self_attn.o_proj.weight",
    "midlayer.mlp.gate_proj.weight": "layers.0.mlp.gate_proj.weight",
    "midlayer.mlp.up_proj.weight": "layers.0.mlp.up_proj.weight",
    "midlayer.mlp.down_proj.weight": "layers.0.mlp.down_proj.weight",
    "norm.weight": "norm.weight",
    "lm_head.weight": "lm_head.weight",
    "d2t": "d2t",
    "t2d": "t2d",
}


def write_speculators(drafter: Drafter, folder: Path, *, maps: bool = True) -> Path:
    """The folder as speculators 0.9.0 writes it, its embedding of the target included."""
    shape = drafter.shape
    layer = LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=1,
        num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_key_value_heads,
        head_dim=shape.head_dim,
        rms_norm_eps=shape.rms_norm_eps,
        max_position_embeddings=shape.max_position_embeddings,
        rope_parameters=dict(shape.rope_parameters),
    )
    config = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "x", "architectures": []}},
        "transformer_layer_config": layer.to_diff_dict(),
        "draft_vocab_size": shape.draft_vocab_size,
        "eagle_aux_hidden_state_layer_ids": [layer_id + 1 for layer_id in shape.aux_layers],
        "embed_requires_grad": False,
        "fc_norm": False,
        "norm_before_fc": False,
        "norm_before_residual": False,
        "norm_output": False,
        "target_hidden_size": None,
        "tie_word_embeddings": False,
    }
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {
        other: drafter.state_dict()[name].clone() for name, other in NAMES.items() if maps or name not in ("d2t", "t2d")
    }
    tensors["embed_tokens.weight"] = torch.randn(shape.vocab_size, shape.hidden_size)
    save_file(tensors, folder / WEIGHTS)
    return folder


@pytest.mark.parametrize("rope", [None, LLAMA3], ids=["default", "llama3"])
def test_it_is_the_drafter_of_its_sglang_folder(tmp_path: Path, rope: dict[str, Any] | None) -> None:
    shape = tiny_shape().model_copy(update={"rope_parameters": rope} if rope else {})
    drafter = tiny_drafter(shape, seed=3)
    save_drafter(drafter, tmp_path / "sglang", torch.float32)
    folder = write_speculators(drafter, tmp_path / "speculators")
    assert check_drafter(folder) == read_shape(folder) == read_shape(tmp_path / "sglang") == shape
    one, other = load_drafter(folder), load_drafter(tmp_path / "sglang")
    assert one.shape == other.shape
    assert one.state_dict().keys() == other.state_dict().keys()
    assert all(torch.equal(tensor, other.state_dict()[name]) for name, tensor in one.state_dict().items())
    assert torch.equal(one.inverse_frequencies, other.inverse_frequencies)


def test_what_equals_the_defaults_of_llama_is_not_written_and_yet_read(tmp_path: Path) -> None:
    shape = tiny_shape().model_copy(update={"max_position_embeddings": 2048, "rms_norm_eps": 1e-6})
    folder = write_speculators(tiny_drafter(shape), tmp_path / "x")
    edit(lambda c: [c["transformer_layer_config"].pop(k) for k in ("max_position_embeddings", "rms_norm_eps")])(folder)
    assert read_shape(folder) == shape


def test_the_defaults_are_those_of_llama() -> None:
    assert {key: getattr(LlamaConfig(), key) for key in LLAMA_DEFAULTS} == LLAMA_DEFAULTS
    assert LlamaConfig().rope_parameters == text_rope({})


def test_without_maps_each_draft_token_is_the_targets(tmp_path: Path) -> None:
    whole = tiny_drafter(tiny_shape(draft_vocab=VOCAB))
    for maps in (False, True):
        loaded = load_drafter(write_speculators(whole, tmp_path / str(maps), maps=maps))
        assert loaded.target_ids.tolist() == list(range(VOCAB)) and bool(loaded.t2d.all())
        assert torch.equal(loaded.lm_head.weight, whole.lm_head.weight)


def test_training_starts_from_it_when_the_captured_layers_are_its_own(tmp_path: Path, target_folder: Path) -> None:
    drafter = tiny_drafter(tiny_shape(), seed=2)
    settings = DrafterConfig(path=str(write_speculators(drafter, tmp_path / "x")))
    facts = read_facts(TargetConfig(path=str(target_folder), aux_layers=(1, 3, 4)))
    start = start_drafter(settings, facts, drafter.d2t, drafter.t2d, seed=1)
    assert all(torch.equal(tensor, drafter.state_dict()[name]) for name, tensor in start.state_dict().items())
    as_written = read_facts(TargetConfig(path=str(target_folder), aux_layers=(2, 4, 5)))
    with pytest.raises(CheckpointError, match=r"listens to other layers.*found \[1, 3, 4\]"):
        start_drafter(settings, as_written, drafter.d2t, drafter.t2d, seed=1)


Change = Callable[[dict[str, Any]], object]


def edit(change: Change) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        change(config)
        (folder / "config.json").write_text(json.dumps(config))

    return apply


def retensor(change: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        change(tensors)
        save_file(tensors, folder / WEIGHTS)

    return apply


def layer(**values: Any) -> Callable[[Path], None]:
    return edit(lambda c: c["transformer_layer_config"].update(values))


REFUSALS: dict[str, tuple[Callable[[Path], None], str]] = {
    "another method": (edit(lambda c: c.update(speculators_model_type="dflash")), "expected eagle3, found dflash"),
    "norm_before_residual": (edit(lambda c: c.update(norm_before_residual=True)), "norm_before_residual switched on"),
    "fc_norm": (edit(lambda c: c.update(fc_norm=True)), "fc_norm switched on"),
    "norm_output": (edit(lambda c: c.update(norm_output=True)), "norm_output switched on"),
    "an embedding of its own": (edit(lambda c: c.update(embed_requires_grad=True)), "embed_requires_grad: expected F"),
    "a Qwen3 layer": (layer(model_type="qwen3"), "transformer_layer_config.model_type: expected llama, found qwen3"),
    "no layer type": (edit(lambda c: c["transformer_layer_config"].pop("model_type")), "expected llama, found None"),
    "two layers": (layer(num_hidden_layers=2), "transformer_layer_config.num_hidden_layers: expected 1, found 2"),
    "another activation": (layer(hidden_act="gelu"), "hidden_act: expected silu, found gelu"),
    "a narrower drafter": (
        edit(lambda c: c.update(target_hidden_size=64)),
        "target_hidden_size: expected 32, found 64",
    ),
    "no layer ids": (edit(lambda c: c.update(eagle_aux_hidden_state_layer_ids=None)), "2, n//2 and n-3 of the target"),
    "the embedding as a state": (
        edit(lambda c: c.update(eagle_aux_hidden_state_layer_ids=[0, 4, 5])),
        "expected three layer ids (input of layer k, 1 or more), found [0, 4, 5]",
    ),
    "five layer ids": (edit(lambda c: c.update(eagle_aux_hidden_state_layer_ids=[1, 2, 3, 4, 5])), "found [1, 2, 3, 4"),
    "biases in the attention": (layer(attention_bias=True), "transformer_layer_config.attention_bias: expected False"),
    "a size is a word": (layer(hidden_size="b"), "transformer_layer_config.hidden_size: expected an integer above 0"),
    "the layer is a list": (
        edit(lambda c: c.update(transformer_layer_config=[])),
        "transformer_layer_config: expected an object, found []",
    ),
    "no layer": (edit(lambda c: c.pop("transformer_layer_config")), "expected the key 'transformer_layer_config'"),
    "a draft vocabulary of null": (
        edit(lambda c: c.update(draft_vocab_size=None)),
        "draft_vocab_size: expected a valid integer, found None",
    ),
    "no draft vocabulary": (edit(lambda c: c.pop("draft_vocab_size")), "expected the key 'draft_vocab_size'"),
    "no map": (retensor(lambda t: (t.pop("d2t"), t.pop("t2d"))), "missing ['d2t', 't2d']"),
    "SGLang's name": (
        retensor(lambda t: t.update({"midlayer.hidden_norm.weight": t.pop("layers.0.hidden_norm.weight")})),
        "missing ['layers.0.hidden_norm.weight'], unknown ['midlayer.hidden_norm.weight']",
    ),
    "norms of queries": (
        retensor(lambda t: t.update({"layers.0.self_attn.q_norm.weight": torch.ones(16)})),
        "unknown ['layers.0.self_attn.q_norm.weight']",
    ),
    "a shape": (
        retensor(lambda t: t.update({"fc.weight": torch.zeros(32, 64)})),
        "shape of fc.weight: |expected [32, 96], found [32, 64]",
    ),
    "d2t as absolute ids": (
        retensor(lambda t: t.update(d2t=t["d2t"] + torch.arange(128))),
        "expected d2t as offsets",
    ),
}


@pytest.mark.parametrize(("damage", "parts"), REFUSALS.values(), ids=REFUSALS.keys())
def test_what_cannot_be_read_is_named(tmp_path: Path, damage: Callable[[Path], None], parts: str) -> None:
    folder = write_speculators(tiny_drafter(tiny_shape()), tmp_path / "x")
    load_drafter(folder)
    damage(folder)
    with pytest.raises(CheckpointError) as caught:
        load_drafter(folder)
    for part in [str(folder), *parts.split("|")]:
        assert part in str(caught.value)
