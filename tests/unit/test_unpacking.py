"""Packed weights unpacked in one pass, by what torch.compile makes of it, against the same step by step: bit for bit."""

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from ray_eagle.target import unpacking
from ray_eagle.target.packed import PackedExperts
from ray_eagle.target.unpacking import OnePass, int4, plain_int4, scaled, unpack_scaled
from tests.families import FAMILIES
from tests.packing import PROJECTIONS, quantised
from tests.unit.test_packed import everything, loaded, random_pack

Pair = tuple[Tensor, Tensor]
NEEDS_COMPILER = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")


def compiled(monkeypatch: pytest.MonkeyPatch, backend: Any) -> None:
    """Unpack on the CPU as on a GPU."""
    torch._dynamo.reset()
    monkeypatch.setattr(unpacking, "COMPILED", ("cpu",))
    monkeypatch.setattr(unpacking, "ONE_PASS_INT4", OnePass(int4, backend))
    monkeypatch.setattr(unpacking, "ONE_PASS_SCALED", OnePass(scaled, backend))


def int4_of(generator: torch.Generator, experts: int, rows: int, groups: int, dtype: torch.dtype) -> Pair:
    """Random bits in groups of 32."""
    packed = torch.randint(-(2**31), 2**31, (experts, rows, 4 * groups), generator=generator).int()
    return packed, torch.randn(experts, rows, groups, generator=generator).to(dtype)


def blocks_of(generator: torch.Generator, experts: int, rows: int, groups: int, kind: torch.dtype) -> Pair:
    """Random numbers in blocks of 5 rows and 16 columns."""
    numbers = torch.randn(experts, rows, 16 * groups, generator=generator) * 50
    return numbers.to(kind), torch.rand(experts, -(-rows // 5), groups, generator=generator)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=NEEDS_COMPILER)])
def test_one_pass_is_the_same_bit_for_bit_and_compiles_once_for_all_sizes(
    monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    generator = torch.Generator().manual_seed(0)
    counter = CompileCounterWithBackend(backend)
    sizes = [[int(torch.randint(1, 7, (), generator=generator)) for _ in range(3)] for _ in range(20)]
    for make, unpack, dtype in (
        (int4_of, unpacking.unpack_int4, torch.bfloat16),
        (blocks_of, lambda *pair: unpack_scaled(*pair, block=(5, 16)), torch.float8_e4m3fn),
    ):
        pairs = [make(generator, *size, dtype) for size in sizes]
        plain = [unpack(*pair) for pair in pairs]
        with monkeypatch.context() as patched:
            compiled(patched, counter)
            before = counter.frame_count
            for pair, expected in zip(pairs, plain, strict=True):
                found = unpack(*pair)
                assert found.dtype == expected.dtype == torch.bfloat16 and torch.equal(found, expected)
            assert counter.frame_count == before + 1
            assert not unpacking.ONE_PASS_INT4.fails and not unpacking.ONE_PASS_SCALED.fails


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_value_of_four_bits_and_any_scale(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    packed, scale = int4_of(generator, 2, 50, 3, dtype)
    compiled(monkeypatch, "aot_eager")
    found = unpacking.unpack_int4(packed, scale)
    assert found.dtype == dtype and torch.equal(found, plain_int4(packed, scale))
    numbers = torch.tensor([[(int(word) >> 4 * i) % 16 - 8 for word in packed.flatten() for i in range(8)]])
    assert len(numbers.unique()) == 16
    assert torch.equal(found, (numbers.view(2, 50, 3, 32) * scale[..., None]).view(2, 50, 96))


@pytest.mark.parametrize("kind", ["int4", "fp8-rows"])
def test_states_of_packed_targets_are_the_same_bits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str) -> None:
    """Experts and single layers."""
    folder, _ = quantised(FAMILIES["deepseek_v3"](tmp_path / "plain"), tmp_path, kind, PROJECTIONS)
    stage, pack = loaded(folder, dtype="bfloat16"), random_pack(4)
    assert any(isinstance(module, PackedExperts) for module in stage.parts.layers.modules())
    plain = everything(stage, pack)
    counter = CompileCounterWithBackend("aot_eager")
    compiled(monkeypatch, counter)
    assert all(torch.equal(found, plain[name]) for name, found in everything(stage, pack).items())
    assert counter.frame_count, "the compiled path ran"


def test_without_a_compiler_it_goes_step_by_step(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked = []

    def backend(*_: Any) -> Callable[..., Any]:
        asked.append(1)
        raise RuntimeError("Failed to find C compiler.\nMore.")

    compiled(monkeypatch, backend)
    for seed in range(3):
        packed, scale = int4_of(torch.Generator().manual_seed(seed), 2, 3, 4, torch.bfloat16)
        with caplog.at_level(logging.WARNING):
            assert torch.equal(unpacking.unpack_int4(packed, scale), plain_int4(packed, scale))
    [told] = [record for record in caplog.records if record.name == unpacking.__name__]
    assert "step by step" in told.message and "Failed to find C compiler" in told.message
    assert len(asked) == 1


def test_memory_that_runs_out_is_no_missing_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def backend(*_: Any) -> Callable[..., Any]:
        def run(*_: Any) -> Any:
            calls.append(1)
            raise torch.OutOfMemoryError("out of memory")

        return run

    compiled(monkeypatch, backend)
    pair = int4_of(torch.Generator().manual_seed(0), 2, 3, 4, torch.bfloat16)
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError):
            unpacking.unpack_int4(*pair)
    assert len(calls) == 2


def test_groups_of_broken_words_go_step_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """No format has them; 12 values are one and a half words."""
    generator = torch.Generator().manual_seed(2)
    packed, scale = int4_of(generator, 1, 6, 3, torch.bfloat16)
    compiled(monkeypatch, "aot_eager")
    scale = scale.repeat_interleave(3, -1)[..., :8]
    assert torch.equal(unpacking.unpack_int4(packed, scale), plain_int4(packed, scale))
