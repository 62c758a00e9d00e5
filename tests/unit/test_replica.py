"""The reference engine as a replica holds it: what it is loaded from, and how a request decodes."""

from pathlib import Path
from typing import Any

import pytest
import torch

from ray_eagle.config import ServeConfig, TargetConfig
from ray_eagle.drafter.checkpoint import save_drafter
from ray_eagle.errors import CheckpointError, ConfigError
from ray_eagle.serving.engine import Speculation
from ray_eagle.serving.generation import Generation
from ray_eagle.serving.messages import ConfigureRequest, GenerateRequest
from ray_eagle.serving.reference import ReferenceEngine, load_engine
from ray_eagle.serving.replica import Replica
from tests.tiny import tiny_drafter, tiny_shape
from tests.unit.test_reference_engine import load


def test_load_engine_takes_an_exported_drafter_or_a_random_one(target_folder: Path, tmp_path: Path) -> None:
    target, serve = TargetConfig(path=str(target_folder)), ServeConfig(dtype="float32")
    drafter = tiny_drafter(tiny_shape(), seed=2)
    save_drafter(drafter, tmp_path / "d", torch.float32)
    engine, facts, shape = load_engine(target, serve, tmp_path / "d", None, seed=0)
    assert (facts.hidden_size, shape) == (32, drafter.shape)
    expected: Generation = ReferenceEngine(load(target_folder), [], drafter).speculate([1, 2, 3], 20, 3)
    assert [p.drafted for p in engine.speculate([1, 2, 3], 20, 3).passes] == [p.drafted for p in expected.passes]
    again = [
        load_engine(target, serve, None, tiny_shape(), seed)[0].speculate([1, 2], 20, 3).passes for seed in (1, 1, 2)
    ]
    assert again[0] == again[1] != again[2]
    bf16, _, _ = load_engine(target, ServeConfig(dtype="bfloat16"), tmp_path / "d", None, seed=0)
    assert bf16.model.dtype == torch.bfloat16 and len(bf16.speculate([1, 2, 3], 20, 3).tokens) == 20


def test_a_request_decodes_as_configured_unless_it_says_otherwise(target_folder: Path) -> None:
    serve = ServeConfig(dtype="float32", steps=2)
    replica = Replica(TargetConfig(path=str(target_folder)), serve, None, tiny_shape(), 0)

    def drafted(**asked: Any) -> tuple[int, int]:
        """Longest chain of `generate` and of `stream`; 0 without speculation."""
        request = GenerateRequest(input_ids=[1, 2, 3], max_new_tokens=12, **asked)
        lines: list[Any] = []
        replica.stream(request, lines.append)
        both = replica.generate(request), lines[-1].reply
        return tuple(max((len(p.drafted) for p in reply.passes), default=0) for reply in both)  # type: ignore[return-value]

    now = replica.engine().speculation
    assert now and (now.steps, drafted(), drafted(steps=5), drafted(plain=True)) == (2, (2, 2), (5, 5), (0, 0))
    for speculation, steps in ((Speculation(steps=4), 4), (None, 0), (Speculation(steps=1), 1)):
        assert replica.configure(ConfigureRequest(speculation=speculation)).speculation == speculation
        assert (drafted(), drafted(steps=5), drafted(plain=True)) == ((steps, steps), (5, 5), (0, 0))


def test_load_engine_refuses_a_drafter_of_another_target(target_folder: Path, tmp_path: Path) -> None:
    target = TargetConfig(path=str(target_folder))
    save_drafter(tiny_drafter(tiny_shape(hidden=16)), tmp_path / "d")
    with pytest.raises(CheckpointError, match="hidden_size"):
        load_engine(target, ServeConfig(), tmp_path / "d", None, seed=0)
    with pytest.raises(CheckpointError, match="aux layer"):
        load_engine(target, ServeConfig(), None, tiny_shape(aux_layers=(1, 3, 8)), seed=0)
    with pytest.raises(ConfigError, match="either"):
        load_engine(target, ServeConfig(), None, None, seed=0)
