"""The drafter folder that SGLang loads: what is written, and how everything that can be wrong with one is named."""

import json
import random
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ray_eagle.drafter.checkpoint import check_fits, load_drafter, read_shape, save_drafter
from ray_eagle.drafter.files import WEIGHTS, read_tensor, tensor_bytes
from ray_eagle.drafter.model import Drafter
from ray_eagle.errors import CheckpointError
from tests.tiny import VOCAB, tiny_drafter, tiny_shape
from tests.unit.test_rotary import LLAMA3, ROPES

H, Q, KV, MLP, D = 32, 64, 32, 96, 128
TENSORS: dict[str, list[int]] = {
    "fc.weight": [H, 3 * H],
    "midlayer.input_layernorm.weight": [H],
    "midlayer.hidden_norm.weight": [H],
    "midlayer.post_attention_layernorm.weight": [H],
    "midlayer.self_attn.q_proj.weight": [Q, 2 * H],
    "midlayer.self_attn.k_proj.weight": [KV, 2 * H],
    "midlayer.self_attn.v_proj.weight": [KV, 2 * H],
    "midlayer.self_attn.o_proj.weight": [H, Q],
    "midlayer.mlp.gate_proj.weight": [MLP, H],
    "midlayer.mlp.up_proj.weight": [MLP, H],
    "midlayer.mlp.down_proj.weight": [H, MLP],
    "norm.weight": [H],
    "lm_head.weight": [D, H],
    "d2t": [D],
    "t2d": [VOCAB],
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_drafter(tiny_drafter(tiny_shape()), tmp_path / "drafter")
    return tmp_path / "drafter"


def config(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """Apply a change to the config.json of a folder."""

    def apply(folder: Path) -> None:
        content = json.loads((folder / "config.json").read_text())
        change(content)
        (folder / "config.json").write_text(json.dumps(content))

    return apply


def weights(change: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], None]:
    """Apply a change to the tensors of a folder."""

    def apply(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        change(tensors)
        save_file(tensors, folder / WEIGHTS)

    return apply


def refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_drafter(folder)
    return str(caught.value)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES.keys())
def test_what_is_saved_is_loaded(tmp_path: Path, rope: dict[str, Any], dtype: torch.dtype) -> None:
    shape = tiny_shape().model_copy(update={"rope_parameters": rope, "rms_norm_eps": 1e-6})
    drafter = tiny_drafter(shape, seed=4)
    save_drafter(drafter, tmp_path / "new" / "folder", dtype)
    assert sorted(p.name for p in (tmp_path / "new" / "folder").iterdir()) == ["config.json", "model.safetensors"]
    loaded = load_drafter(tmp_path / "new" / "folder")
    assert loaded.shape == shape
    assert loaded.state_dict().keys() == drafter.state_dict().keys()
    for name, tensor in drafter.state_dict().items():
        found = loaded.state_dict()[name]
        if tensor.is_floating_point():
            assert found.dtype == torch.float32
            assert torch.equal(found, tensor.to(dtype).float())
        else:
            assert (found.dtype, found.tolist()) == (tensor.dtype, tensor.tolist())
    assert load_drafter(tmp_path / "new" / "folder", torch.bfloat16).fc.weight.dtype == torch.bfloat16


def test_saving_again_replaces_the_drafter(folder: Path) -> None:
    save_drafter(tiny_drafter(tiny_shape(hidden=16, draft_vocab=64), seed=9), folder)
    assert load_drafter(folder).shape.hidden_size == 16
    assert len(list(folder.iterdir())) == 2


def test_config_holds_what_sglang_reads(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    expected = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": H,
        "intermediate_size": MLP,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_hidden_layers": 1,
        "vocab_size": VOCAB,
        "draft_vocab_size": D,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4], "use_aux_hidden_state": True},
        "eagle_aux_hidden_state_layer_ids": [1, 3, 4],
    }
    assert {key: config[key] for key in expected} == expected


def test_scaled_rope_is_written_in_the_new_and_the_old_keys(tmp_path: Path) -> None:
    save_drafter(tiny_drafter(tiny_shape().model_copy(update={"rope_parameters": LLAMA3})), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["rope_parameters"] == LLAMA3
    assert config["rope_theta"] == 500000.0
    assert config["rope_scaling"] == {key: value for key, value in LLAMA3.items() if key != "rope_theta"}


def test_weights_are_exactly_the_tensors_that_sglang_reads(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    assert {name: list(tensor.shape) for name, tensor in tensors.items()} == TENSORS
    kinds = {name: tensor.dtype for name, tensor in tensors.items()}
    assert (kinds.pop("d2t"), kinds.pop("t2d")) == (torch.int64, torch.bool)
    assert set(kinds.values()) == {torch.bfloat16}
    assert tensor_bytes(folder / WEIGHTS) == sum(t.numel() * t.element_size() for t in tensors.values())
    for i, offset in enumerate(tensors["d2t"].tolist()):
        assert tensors["t2d"][i + offset]
    assert int(tensors["t2d"].sum()) == D


def test_a_drafter_without_a_valid_map_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="vocabulary map"):
        save_drafter(Drafter(tiny_shape()), tmp_path / "drafter")
    assert not (tmp_path / "drafter").exists()


Change = Callable[[dict[str, Any]], object]
VARIANTS: dict[str, tuple[Change, dict[str, Any]]] = {
    "ids on top level alone": (lambda c: c.pop("eagle_config"), {"aux_layers": (1, 3, 4)}),
    "ids nested alone": (lambda c: c.pop("eagle_aux_hidden_state_layer_ids"), {"aux_layers": (1, 3, 4)}),
    "rope_theta alone": (
        lambda c: (c.pop("rope_parameters"), c.update(rope_theta=1e6)),
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    ),
    "rope_scaling of old": (
        lambda c: (
            c.pop("rope_parameters"),
            c.update(rope_theta=7e4, rope_scaling={"type": "linear", "factor": 2.0}),
        ),
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 7e4}},
    ),
    "theta outside of rope_parameters": (
        lambda c: c.update(rope_theta=3e5, rope_parameters={"rope_type": "default"}),
        {"rope_parameters": {"rope_type": "default", "rope_theta": 3e5}},
    ),
    "no kv heads": (lambda c: c.pop("num_key_value_heads"), {"num_key_value_heads": 4}),
    "no head_dim": (lambda c: c.pop("head_dim"), {"head_dim": 8}),
    "no draft vocabulary": (lambda c: c.pop("draft_vocab_size"), {"draft_vocab_size": VOCAB}),
    "keys that nobody knows": (lambda c: c.update(speculator="eagle3"), {}),
}


@pytest.mark.parametrize(("change", "expected"), VARIANTS.values(), ids=VARIANTS.keys())
def test_configs_of_other_tools_are_read(folder: Path, change: Change, expected: dict[str, Any]) -> None:
    config(change)(folder)
    assert read_shape(folder) == tiny_shape().model_copy(update=expected)


CONFIG: dict[str, tuple[Change, str]] = {
    "another architecture": (
        lambda c: c.update(architectures=["LlamaForCausalLM"]),
        "config.json: expected LlamaForCausalLMEagle3 or Eagle3DeepseekV2ForCausalLM, found LlamaForCausalLM",
    ),
    "no hidden_size": (lambda c: c.pop("hidden_size"), "config.json: expected the key 'hidden_size', found none"),
    "hidden_size is a word": (
        lambda c: c.update(hidden_size="b"),
        "config.json, hidden_size: expected an integer above 0, found 'b'",
    ),
    "hidden_size in quotes": (
        lambda c: c.update(hidden_size="32"),
        "hidden_size: expected an integer above 0, found '32'",
    ),
    "a context in quotes": (
        lambda c: c.update(max_position_embeddings="512"),
        "max_position_embeddings: expected an integer above 0, found '512'",
    ),
    "no heads": (
        lambda c: c.update(num_attention_heads=0),
        "num_attention_heads: expected an integer above 0, found 0",
    ),
    "heads are null": (
        lambda c: c.update(num_attention_heads=None, head_dim=None),
        "config.json, num_attention_heads: expected an integer above 0, found None",
    ),
    "a word for eps": (lambda c: c.update(rms_norm_eps="x"), "config.json, rms_norm_eps: expected a number, found 'x'"),
    "rope is a word": (
        lambda c: c.update(rope_parameters="yarn"),
        "config.json, rope_parameters: expected an object, found 'yarn'",
    ),
    "a word for theta": (
        lambda c: c["rope_parameters"].update(rope_theta="abc"),
        "config.json, rope_parameters.rope_theta: expected a number, found 'abc'",
    ),
    "eagle_config is a list": (
        lambda c: c.update(eagle_config=[1]),
        "config.json, eagle_config: expected an object, found [1]",
    ),
    "architectures is a word": (
        lambda c: c.update(architectures="LlamaForCausalLMEagle3"),
        "config.json, architectures: expected a list of one name, found 'LlamaForCausalLMEagle3'",
    ),
    "architectures is a number": (lambda c: c.update(architectures=[3]), "architectures: expected a list of one name"),
    "another activation": (lambda c: c.update(hidden_act="gelu"), "config.json, hidden_act: expected silu, found gelu"),
    "biases in the attention": (
        lambda c: c.update(attention_bias=True),
        "config.json, attention_bias: expected False, found True",
    ),
    "biases in the MLP": (lambda c: c.update(mlp_bias=True), "config.json, mlp_bias: expected False, found True"),
    "unknown rope": (lambda c: c["rope_parameters"].update(rope_type="spiral"), "RoPE: |expected default or |spiral"),
    "no layer ids": (
        lambda c: (c.pop("eagle_config"), c.pop("eagle_aux_hidden_state_layer_ids")),
        "eagle_aux_hidden_state_layer_ids: expected three layer ids|found None",
    ),
    "two layer ids": (
        lambda c: c["eagle_config"].update(eagle_aux_hidden_state_layer_ids=[1, 3]),
        "config.json, eagle_config.eagle_aux_hidden_state_layer_ids: expected three layer ids",
    ),
    "a layer id is a word": (
        lambda c: c["eagle_config"].update(eagle_aux_hidden_state_layer_ids=[1, 3, "x"]),
        "eagle_aux_hidden_state_layer_ids: expected three layer ids|found 'x'",
    ),
    "head of another vocabulary": (lambda c: c.update(draft_vocab_size=64), "shape of |expected [64"),
}
WEIGHT: dict[str, tuple[Callable[[dict[str, Tensor]], object], str]] = {
    "no lm_head": (lambda t: t.pop("lm_head.weight"), "15 names, found missing ['lm_head.weight'], unknown none"),
    "an unknown tensor": (
        lambda t: t.update(embed_tokens=torch.zeros(VOCAB, H)),
        "expected exactly 15 names, found missing none, unknown ['embed_tokens']",
    ),
    "a renamed tensor": (
        lambda t: t.update({"layers.0.hidden_norm": t.pop("midlayer.hidden_norm.weight")}),
        "missing ['midlayer.hidden_norm.weight'], unknown ['layers.0.hidden_norm']",
    ),
    "fc for two layers": (
        lambda t: t.update({"fc.weight": torch.zeros(H, 2 * H)}),
        "shape of fc.weight: |expected [32, 96], found [32, 64]",
    ),
    "d2t in 32 bits": (lambda t: t.update(d2t=t["d2t"].int()), "dtype of d2t: |expected I64, found I32"),
    "t2d in bytes": (lambda t: t.update(t2d=t["t2d"].byte()), "dtype of t2d: |expected BOOL, found U8"),
    "integer weights": (
        lambda t: t.update({"norm.weight": t["norm.weight"].long()}),
        "dtype of norm.weight: |expected F32 or F16 or BF16, found I64",
    ),
    "d2t as absolute ids": (
        lambda t: t.update(d2t=t["d2t"] + torch.arange(D)),
        "expected d2t as offsets|absolute ids in d2t are a known fault",
    ),
    "t2d that disagrees": (lambda t: t.update(t2d=t["t2d"].roll(1)), "vocabulary map: |found two maps that disagree"),
    "d2t beyond V": (lambda t: t["d2t"].__setitem__(-1, VOCAB), "vocabulary map: |found ids out of range"),
    "d2t below zero": (lambda t: t["d2t"].__setitem__(0, -1), "vocabulary map: |found ids out of range"),
    "one id twice": (lambda t: t["d2t"].__setitem__(1, int(t["d2t"][0]) - 1), "found two maps that disagree"),
}
WEIGHT |= {
    f"a weight that is {value}": (
        lambda t, value=value: t["midlayer.mlp.up_proj.weight"].view(-1)[3:5].fill_(value),  # type: ignore[misc]
        f"{WEIGHTS}, midlayer.mlp.up_proj.weight: |expected finite numbers, found 2 of {MLP * H} that are NaN or infinite",
    )
    for value in (float("nan"), float("inf"), float("-inf"))
}
FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda f: (f / "config.json").unlink(), "config.json: expected config.json, found nothing"),
    "no weights": (lambda f: (f / WEIGHTS).unlink(), f"{WEIGHTS}: expected a safetensors file, found nothing"),
    "no JSON": (lambda f: (f / "config.json").write_text("{"), "config.json is not valid JSON"),
    "no text": (lambda f: (f / "config.json").write_bytes(b"\xff\xfe"), "config.json is not valid JSON"),
    "a list": (
        lambda f: (f / "config.json").write_text("[]"),
        "config.json: expected an object, found a JSON list",
    ),
}
DAMAGES = (
    FILES | {n: (config(c), p) for n, (c, p) in CONFIG.items()} | {n: (weights(c), p) for n, (c, p) in WEIGHT.items()}
)


@pytest.mark.parametrize(("damage", "parts"), DAMAGES.values(), ids=DAMAGES.keys())
def test_damage_is_named(folder: Path, damage: Callable[[Path], object], parts: str) -> None:
    load_drafter(folder)
    damage(folder)
    message = refusal(folder)
    assert str(folder) in message or "RoPE" in parts
    for part in parts.split("|"):
        assert part in message


def test_missing_folder_is_named(tmp_path: Path) -> None:
    assert refusal(tmp_path / "no").startswith(f"no drafter: {tmp_path / 'no'}: expected a folder, found nothing")


@pytest.mark.parametrize("seed", range(30))
def test_a_file_of_another_length_is_named_with_both_lengths(folder: Path, seed: int) -> None:
    path = folder / WEIGHTS
    data = path.read_bytes()
    header = struct.unpack("<Q", data[:8])[0]
    rng = random.Random(seed)
    cut = [rng.randrange(8), rng.randrange(8, 8 + header), rng.randrange(8 + header, len(data))][seed % 3]
    path.write_bytes(data[:cut])
    expected = ["at least 8 bytes", f"a header of {header} bytes", f"{len(data)} bytes"][seed % 3]
    message = refusal(folder)
    assert message.startswith(f"truncated safetensors: {path}: expected {expected}, found ")
    assert re.search(rf"found (a file of )?{cut}\b", message)
    assert "Copy the file again" in message

    path.write_bytes(data + data[:cut] + b"x")
    message = refusal(folder)
    assert message.startswith(f"safetensors with more than their tensors: {path}: ")
    assert f"expected {len(data)} bytes, found {len(data) + cut + 1} bytes" in message


@pytest.mark.parametrize(
    "header", [b"{", b"[]", b"null", b"\xff\xfe\x00", b'{"a": 3}', b'{"a": {}}', b'{"a": {"dtype": 1}}']
)
def test_a_header_of_garbage_is_named(folder: Path, header: bytes) -> None:
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(header)) + header)
    message = refusal(folder)
    assert message.startswith(f"{folder / WEIGHTS}: the safetensors header is damaged")


@pytest.mark.parametrize("seed", range(60))
def test_a_changed_byte_in_the_header_changes_no_weight_silently(folder: Path, seed: int) -> None:
    rng = random.Random(seed)
    before = load_drafter(folder).state_dict()
    data = bytearray((folder / WEIGHTS).read_bytes())
    length = struct.unpack("<Q", data[:8])[0]
    at = rng.randrange(8 + length) if seed % 6 else rng.randrange(8)
    data[at] = rng.choice([b for b in (*b'0123456789"{}[],: aF', rng.randrange(256)) if b != data[at]])
    (folder / WEIGHTS).write_bytes(data)
    try:
        after = load_drafter(folder).state_dict()
    except CheckpointError as error:
        assert str(folder / WEIGHTS) in str(error)
    else:  # a blank, or a letter of the metadata
        assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_one_tensor_is_read_alone_or_named(folder: Path) -> None:
    assert torch.equal(read_tensor(folder / WEIGHTS, "d2t"), tiny_drafter(tiny_shape()).d2t)
    for path, name in ((folder / WEIGHTS, "none"), (folder / "none", "d2t")):
        with pytest.raises(CheckpointError, match=f"{re.escape(str(path))}: tensor {name} cannot be read"):
            read_tensor(path, name)


@pytest.mark.parametrize(
    ("target", "parts"),
    [
        ({"hidden_size": 64}, ["another target: hidden_size: HERE: expected 64 (the target's), found 32"]),
        ({"vocab_size": 300}, ["another target: vocab_size: HERE: expected 300 (the target's), found 261"]),
        ({"layers": 4}, ["aux layer ids: HERE: expected below 4 (the target's layers), found [1, 3, 4]"]),
        (
            {"captured": (1, 3, 5)},
            ["HERE: expected [1, 3, 5] (the captured ones), found [1, 3, 4]", "[1, 3, 4], and ex"],
        ),
    ],
)
def test_a_drafter_for_another_target_is_refused(target: dict[str, Any], parts: list[str]) -> None:
    fits: dict[str, Any] = {"hidden_size": 32, "vocab_size": VOCAB, "layers": 5, "captured": (1, 3, 4)}
    check_fits(tiny_shape(), **fits, where="HERE")
    with pytest.raises(CheckpointError) as caught:
        check_fits(tiny_shape(), **(fits | target), where="HERE")
    for part in parts:
        assert part in str(caught.value)
