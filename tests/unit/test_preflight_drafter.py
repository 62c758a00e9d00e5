"""What preflight says of a given drafter, by its headers alone."""

import os
import resource
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ray_eagle.drafter.checkpoint import save_drafter
from ray_eagle.preflight.artifacts import check_given_drafter
from ray_eagle.target.layers import SGLANG_BEFORE, SGLANG_SINCE, layer_readings
from ray_eagle.target.loading import TargetFacts
from tests.drafters import AQ_MEDAI, sparse_drafter
from tests.tiny import VOCAB, tiny_drafter, tiny_shape
from tests.unit import test_preflight
from tests.unit.test_preflight import bad, check, edit, settings

target = test_preflight.target


def drafter_at(folder: Path, **shape: Any) -> Path:
    save_drafter(tiny_drafter(tiny_shape(**shape)), folder)
    return folder


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_sound_drafter_is_described(target: Path, tmp_path: Path) -> None:
    drafter = drafter_at(tmp_path / "drafter")
    report = check(settings(target, tmp_path / "run", "--drafter.path", str(drafter)))
    assert report.ok
    described = next(finding for finding in report.findings if finding.check == "drafter")
    assert "RoPE default, theta 10000.0 (the target: default, theta 10000.0)" in described.message
    assert bad(report, "warning") == []
    (reading,) = (finding for finding in report.findings if finding.check == "aux layers")
    assert "SGLang reads [1, 3, 4] as the outputs of [1, 3, 4]" in reading.message
    assert "vLLM takes the outputs of [0, 2, 3]" in reading.message


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda d: (d / "config.json").unlink(), "config.json"),
        (lambda d: (d / "model.safetensors").unlink(), "file missing"),
        (lambda d: os.truncate(d / "model.safetensors", 5000), "truncated safetensors"),
        (lambda d: rewrite(d, lambda t: t.pop("lm_head.weight")), "missing ['lm_head.weight']"),
        (lambda d: rewrite(d, lambda t: t.update(extra=torch.zeros(1))), "unknown ['extra']"),
        (lambda d: rewrite(d, lambda t: t.update({"fc.weight": torch.zeros(32, 64)})), "shape of fc.weight"),
        (lambda d: rewrite(d, lambda t: t.update(d2t=t["d2t"] + torch.arange(128))), "vocabulary map"),
        (shutil.rmtree, "no drafter"),
    ],
)
def test_damaged_drafter_is_an_error(damage: Callable[[Path], None], words: str, target: Path, tmp_path: Path) -> None:
    drafter = drafter_at(tmp_path / "drafter")
    damage(drafter)
    report = check(settings(target, tmp_path / "run", "--drafter.path", str(drafter)))
    (error,) = bad(report)
    assert error.check == "drafter"
    assert words in error.message


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ({"hidden": 64}, "another target: hidden_size"),
        ({"vocab": VOCAB + 3}, "another target: vocab_size"),
        ({"aux_layers": (1, 3, 8)}, "aux layer ids"),
    ],
)
def test_drafter_of_another_target_is_an_error(shape: dict[str, Any], words: str, target: Path, tmp_path: Path) -> None:
    drafter = drafter_at(tmp_path / "drafter", **shape)
    (error,) = bad(check(settings(target, tmp_path / "run", "--drafter.path", str(drafter))))
    assert words in error.message


def test_short_context_and_other_layers_are_warnings(target: Path, tmp_path: Path) -> None:
    drafter = drafter_at(tmp_path / "drafter", aux_layers=(2, 3, 5))
    edit(drafter / "config.json", max_position_embeddings=256)
    report = check(settings(target, tmp_path / "run", "--drafter.path", str(drafter)))
    assert report.ok
    warnings = [finding.message for finding in bad(report, "warning")]
    assert any("max_position_embeddings is 256, the target's 512" in text for text in warnings)
    assert any("listens to [2, 3, 5], but the settings capture [1, 3, 4]" in text for text in warnings)


@pytest.mark.parametrize(
    ("ids", "layers", "model_type", "before", "since"),
    [
        ([2, 30, 58], 61, "kimi_k25", [2, 30, 58], [1, 29, 57]),  # the founding case: two meanings in two releases
        ([1, 29, 57], 61, "deepseek_v3", [1, 29, 57], [1, 29, 57]),
        ([2, 16, 29], 32, "llama", [2, 16, 29], [2, 16, 29]),
        ([2, 12, 24], 24, "gpt_oss", [1, 11, 23], [1, 11, 23]),
        ([2, 12, 21], 24, "gpt_oss", [2, 12, 21], [2, 12, 21]),
    ],
)
def test_layer_readings(ids: list[int], layers: int, model_type: str, before: list[int], since: list[int]) -> None:
    readings = layer_readings(ids, layers, model_type)
    assert (readings[SGLANG_BEFORE], readings[SGLANG_SINCE]) == (before, since)
    assert readings["vLLM"] == readings["speculators"] == [k - 1 for k in ids]
    for peer in ("SpecForge", "TorchSpec", "ModelOpt", "AngelSlim"):
        assert readings[peer] == ids


def test_a_drafter_of_2_gigabytes_is_verified_in_milliseconds(tmp_path: Path) -> None:
    folder = tmp_path / "drafter"
    sparse_drafter(folder, AQ_MEDAI)
    size = (folder / "model.safetensors").stat().st_size
    assert 2.3e9 < size < 2.5e9
    facts = TargetFacts(
        path=tmp_path,
        model_type="kimi_k25",
        hidden_size=7168,
        vocab_size=163_840,
        layers=61,
        max_position_embeddings=262_144,
        aux_layers=(2, 30, 58),
        rope={"rope_type": "yarn", "rope_theta": 50000.0},
        intermediate_size=18432,
        num_attention_heads=64,
        num_key_value_heads=64,
        head_dim=128,
        rms_norm_eps=1e-5,
        fingerprint={},
    )
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    read = int(Path("/proc/self/io").read_text().split("rchar: ")[1].split()[0])
    began = time.monotonic()
    findings = check_given_drafter(str(folder), facts)
    seconds = time.monotonic() - began
    read = int(Path("/proc/self/io").read_text().split("rchar: ")[1].split()[0]) - read
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
    assert [finding.level for finding in findings] == ["ok", "warning"]
    assert "2.38 GB, BF16" in findings[0].message
    assert "SGLang since 2026-05 takes the outputs of [1, 29, 57]" in findings[1].message
    assert (seconds < 1, read < 2_000_000, faults < 5000) == (True, True, True), (seconds, read, faults)
