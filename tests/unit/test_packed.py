"""Quantised targets: packed weights give the states of their dequantised twin, and nothing else of them is in memory."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from ray_eagle.config import TargetConfig
from ray_eagle.errors import TargetError
from ray_eagle.target import packed
from ray_eagle.target.capture import Stage, TokenPack
from ray_eagle.target.loading import read_facts
from ray_eagle.target.packed import PackedExperts, PackedLinear, packing_of
from ray_eagle.target.stage import load_model, load_stage
from ray_eagle.target.tensors import SINGLE
from tests.families import FAMILIES
from tests.packing import EXPERTS, KINDS, PROJECTIONS, compressed, quantised
from tests.random_data import random_tokens
from tests.tiny import VOCAB

CPU = torch.device("cpu")
AUX = (1, 3, 4)


def settings(folder: Path, dtype: str = "float32") -> TargetConfig:
    return TargetConfig(path=str(folder), dtype=dtype, aux_layers=AUX)


def loaded(folder: Path, layers: range | None = None, dtype: str = "float32") -> Stage:
    config = settings(folder, dtype)
    return load_stage(read_facts(config), config, CPU, layers)


def everything(stage: Stage, pack: TokenPack) -> dict[str, torch.Tensor]:
    made = stage.run(pack)
    assert made.last_SH is not None and made.lse_S is not None
    return {**{f"layer {k}": v for k, v in made.aux.items()}, "last": made.last_SH, "lse": made.lse_S}


def random_pack(seed: int) -> TokenPack:
    generator = torch.Generator().manual_seed(seed)
    return TokenPack.of([random_tokens(generator, VOCAB) for _ in range(5)])


def edited(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(folder / SINGLE)
    change(tensors)
    save_file(tensors, folder / SINGLE, metadata={"format": "pt"})


@pytest.mark.parametrize("kind", KINDS)
def test_a_weight_is_unpacked_as_its_library_would(kind: str) -> None:
    quantise, config = KINDS[kind]
    packing = packing_of({"quantization_config": config}, Path())
    assert packing is not None
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        rows, words = (int(torch.randint(1, 9, (), generator=generator)) for _ in range(2))
        parts, twin = quantise(torch.randn(rows, 8 * words, generator=generator))
        scale = parts[packing.scale]
        scale = scale.reshape(1, 1) if scale.numel() == 1 and kind != "fp8-blocks" else scale
        both = packing.unpack(parts[packing.weight], scale), packing.unpack(parts[packing.weight][None], scale[None])[0]
        assert all(found.dtype == torch.bfloat16 and torch.equal(found, twin) for found in both)


@pytest.mark.parametrize(
    ("family", "kind", "which"),
    [
        *(("deepseek_v3", kind, EXPERTS) for kind in KINDS),
        ("kimi_k25", "int4", EXPERTS),
        ("qwen3_moe", "fp8-blocks", PROJECTIONS),
        ("glm4_moe", "int4", PROJECTIONS),
        ("qwen2", "int4", PROJECTIONS),
        ("gemma3", "fp8-rows", PROJECTIONS),
    ],
    ids=str,
)
def test_states_are_those_of_the_dequantised_model(
    family: str, kind: str, which: re.Pattern[str], tmp_path: Path
) -> None:
    folders = quantised(FAMILIES[family](tmp_path / "plain"), tmp_path, kind, which)
    pack = random_pack(3)
    stage, twin = (loaded(folder) for folder in folders)
    packed_modules = [m for m in stage.parts.layers.modules() if isinstance(m, PackedLinear | PackedExperts)]
    assert packed_modules and not any(isinstance(m, PackedLinear) for m in twin.parts.layers.modules())
    expected = everything(twin, pack)
    for name, found in everything(stage, pack).items():
        torch.testing.assert_close(found, expected[name], atol=2e-5, rtol=2e-5, msg=lambda m, name=name: f"{name}: {m}")


def test_stages_and_generation_of_a_packed_target(tmp_path: Path) -> None:
    folder, twin = quantised(FAMILIES["deepseek_v3"](tmp_path / "plain"), tmp_path, "int4")
    pack = random_pack(5)
    whole = everything(loaded(folder), pack)
    first, second = loaded(folder, range(5)), loaded(folder, range(5, 8))
    between = first.run(pack)
    made = second.run(pack, between.hidden_TH)
    assert made.last_SH is not None and torch.equal(made.last_SH, whole["last"])
    assert all(torch.equal(between.aux[k], whole[f"layer {k}"]) for k in AUX)
    absent = [m for i in range(5, 8) for m in first.parts.layers[i].modules() if isinstance(m, PackedExperts)]
    assert not absent
    ids = torch.arange(20, 30)[None]
    answers = [
        load_model(read_facts(settings(f)), settings(f), CPU).generate(ids, max_new_tokens=12, do_sample=False)
        for f in (folder, twin)
    ]
    assert torch.equal(*answers)


def test_experts_stay_packed_and_are_unpacked_a_few_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, twin = quantised(FAMILIES["deepseek_v3"](tmp_path / "plain"), tmp_path, "int4")
    stage = loaded(folder, dtype="bfloat16")
    pack = random_pack(5)
    at_once = everything(stage, pack)
    experts = [m for m in stage.parts.layers.modules() if isinstance(m, PackedExperts)]
    assert len(experts) == 6
    held = sum(t.nbytes for m in experts for t in (*m.gate_up, *m.down))
    plain = sum(t.nbytes for n, t in load_file(twin / SINGLE).items() if EXPERTS.search(n))
    assert held == plain * (4 + 16 / 8) / 16  # 4 bits, and a scale for 8 of them
    sizes: list[int] = []
    unpack = experts[0].packing.unpack

    def watched(*pair: torch.Tensor) -> torch.Tensor:
        found = unpack(*pair)
        sizes.append(found.nbytes)
        return found

    monkeypatch.setattr(packed, "UNPACKED_BYTES", 2 * 3 * 16 * 32 * 3)
    for module in experts:
        module.packing = packed.Packing("weight_packed", "weight_scale", watched)
    assert all(torch.equal(found, at_once[name]) for name, found in everything(stage, pack).items())
    assert max(sizes) == 2 * 2 * 16 * 32 * 3  # gate and up of three experts


def test_what_is_not_ours_is_left_to_transformers_or_refused() -> None:
    assert packing_of({}, Path()) is None
    assert packing_of({"quantization_config": {"quant_method": "mxfp4"}}, Path()) is None
    for config, message in (
        (compressed("pack-quantized", 8), "8 bits"),
        (compressed("pack-quantized", 4) | {"config_groups": {}}, "pack-quantized"),
        (compressed("pack-quantized", 4, symmetric=False), "asymmetric"),
        (compressed("pack-quantized", 4, actorder="group"), "actorder group"),
        (compressed("marlin-24", 4), "marlin-24: 4 bits"),
    ):
        with pytest.raises(TargetError, match=rf"(?s)quantization_config.*found.*{message}.*dequantise"):
            packing_of({"quantization_config": config}, Path("folder"))


def lose(name: str) -> Callable[[dict[str, torch.Tensor]], Any]:
    return lambda tensors: [tensors.pop(key) for key in list(tensors) if key.endswith(name)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lose("layers.4.mlp.experts.3.up_proj.weight_packed"), r"experts\.3\.up_proj\.weight_packed.*expected.*found none"),
        (lose("layers.4.mlp.experts.3.up_proj.weight_scale"), r"mlp\.experts\.3\.up_proj.*expected a packed weight"),
        (
            lambda t: t.update({k: v[:-1] for k, v in t.items() if k.endswith("4.mlp.experts.3.up_proj.weight_packed")}),
            r"experts\.3\.up_proj\.weight_packed.*expected \[16, 32\].*found \[15, 32\]",
        ),
        (
            lambda t: t.update({"lm_head.weight_packed": t.pop("lm_head.weight"), "lm_head.weight_scale": torch.ones(1)}),
            r"lm_head.*expected an embedding and a head in floating point",
        ),
        (
            lambda t: t.update({"model.layers.4.mlp.other.weight_scale": torch.ones(1)}),
            r"layer 4, mlp\.other.*no such module",
        ),
    ],
)  # fmt: skip
def test_damage_is_named(change: Callable[[dict[str, torch.Tensor]], Any], message: str, tmp_path: Path) -> None:
    folder, _ = quantised(FAMILIES["deepseek_v3"](tmp_path / "plain"), tmp_path, "int4")
    edited(folder, change)
    with pytest.raises(TargetError, match=f"(?s){message}"):
        loaded(folder)


def test_experts_of_another_make_are_refused(tmp_path: Path) -> None:
    folder = FAMILIES["gpt_oss"](tmp_path / "plain")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = compressed("pack-quantized", 4)
    (folder / "config.json").write_text(json.dumps(config))
    edited(folder, lambda t: t.update({"model.layers.2.mlp.experts.0.up_proj.weight_scale": torch.ones(1)}))
    with pytest.raises(TargetError, match=r"layer 2, mlp\.experts.*biases"):
        loaded(folder)


def test_a_bias_beside_a_packed_weight_is_added() -> None:
    layer = PackedLinear(nn.Linear(16, 3), packing_of({"quantization_config": KINDS["int4"][1]}, Path()))  # type: ignore[arg-type]
    parts, twin = KINDS["int4"][0](torch.randn(3, 16))
    layer.fill(lambda *_: (parts["weight_packed"], parts["weight_scale"]))
    x = torch.randn(5, 16)
    torch.testing.assert_close(layer(x), nn.functional.linear(x, twin.float(), layer.bias))
