"""Embedding, head and final norm of a target, read by key: only these tensors, whatever else the checkpoint holds."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from ray_eagle.config import TargetConfig
from ray_eagle.errors import TargetError
from ray_eagle.target.loading import head_and_embedding, read_facts, read_target_tensor
from tests.tiny import tiny_target

V, H = 40, 8
ROWS = {"head": 1.0, "embedding": 2.0, "norm": 3.0}


def filled(value: float, *shape: int) -> Tensor:
    return torch.full(shape, value, dtype=torch.bfloat16)


def target(folder: Path, tensors: dict[str, Tensor], shards: int = 1, **config: Any) -> Path:
    """A folder of these tensors, in several files or one, with a nested or plain config."""
    folder.mkdir()
    text = {
        "model_type": "kimi_k2",
        "num_hidden_layers": 8,
        "hidden_size": H,
        "vocab_size": V,
        "intermediate_size": 16,
        "num_attention_heads": 2,
    }
    (folder / "config.json").write_text(json.dumps({"model_type": "kimi_k25", "text_config": text} | config))
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    where = {name: f"model-{i % shards}.safetensors" for i, name in enumerate(tensors)}
    for file in set(where.values()):
        save_file({name: tensor for name, tensor in tensors.items() if where[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return folder


def weights(prefix: str, head: str | None) -> dict[str, Tensor]:
    found = {f"{prefix}embed_tokens.weight": filled(2, V, H), f"{prefix}norm.weight": filled(3, H)}
    return found | ({head: filled(1, V, H)} if head else {})


DECOYS = {
    "vision_tower.model.norm.weight": filled(9, 4),
    "vision_model.embed_tokens.weight": filled(9, 4, 4),
    "visual.lm_head.weight": filled(9, 4, 4),
    "model.layers.8.embed_tokens.weight": filled(9, V, H),
    "model.layers.8.lm_head.weight": filled(9, V, H),
    "mtp.layers.0.model.norm.weight": filled(9, H),
}


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize(
    ("prefix", "head"),
    [
        ("model.", "lm_head.weight"),
        ("language_model.model.", "language_model.lm_head.weight"),
        ("model.language_model.model.", "lm_head.weight"),
    ],
)
def test_they_are_found_through_any_prefix_and_among_decoys(
    tmp_path: Path, prefix: str, head: str, shards: int
) -> None:
    folder = target(tmp_path / "t", DECOYS | weights(prefix, head), shards)
    found = head_and_embedding(read_facts(TargetConfig(path=str(folder))))
    assert [tuple(tensor.shape) for tensor in found] == [(V, H), (V, H), (H,)]
    assert [float(tensor.float().mean()) for tensor in found] == list(ROWS.values())


def test_a_tied_head_is_the_embedding_and_a_lost_one_is_an_error(tmp_path: Path) -> None:
    for name, config in (("said", {"tie_word_embeddings": True}), ("unsaid", {})):
        folder = target(tmp_path / name, DECOYS | weights("model.", None), **config)
        head, embedding, _ = head_and_embedding(read_facts(TargetConfig(path=str(folder))))
        assert torch.equal(head, embedding)
    folder = target(tmp_path / "lost", weights("model.", None), tie_word_embeddings=False)
    with pytest.raises(TargetError, match=r"expected lm_head.weight \(tie_word_embeddings is false\), found no such"):
        head_and_embedding(read_facts(TargetConfig(path=str(folder))))


@pytest.mark.parametrize(
    ("name", "tensor", "words"),
    [
        ("lm_head.weight", filled(1, V - 1, H), r"\[40, 8\] by config.json, in floating point, found \[39, 8\]"),
        ("lm_head.weight", torch.zeros(V, H, dtype=torch.int32), "found .* in int32"),
        ("lm_head.weight", torch.zeros(V, H, dtype=torch.float8_e4m3fn), "found .* in float8_e4m3fn"),
        ("model.embed_tokens.weight", filled(1, V, 2 * H), r"found \[40, 16\]"),
        ("model.norm.weight", filled(1, 2 * H), r"found \[16\]"),
    ],
)
def test_other_shapes_and_quantised_ones_are_refused(tmp_path: Path, name: str, tensor: Tensor, words: str) -> None:
    folder = target(tmp_path / "t", weights("model.", "lm_head.weight") | {name: tensor})
    with pytest.raises(TargetError, match=words):
        head_and_embedding(read_facts(TargetConfig(path=str(folder))))


def test_a_layers_tensor_is_read_from_its_own_layer(tmp_path: Path) -> None:
    folder = tiny_target(tmp_path / "tiny")
    one = read_target_tensor(folder, "layers.7.mlp.down_proj.weight")
    other = read_target_tensor(folder, "layers.6.mlp.down_proj.weight")
    assert one is not None and other is not None and not torch.equal(one, other)
    assert read_target_tensor(folder, "layers.8.mlp.down_proj.weight") is None


def test_only_the_file_that_holds_it_is_opened(tmp_path: Path) -> None:
    folder = target(tmp_path / "t", weights("model.", "lm_head.weight") | {"model.layers.0.x": filled(0, 4)}, shards=4)
    (folder / "model-3.safetensors").write_bytes(b"damaged")  # holds the layer alone
    found = head_and_embedding(read_facts(TargetConfig(path=str(folder))))
    assert [float(tensor.float().mean()) for tensor in found] == list(ROWS.values())
