"""Fat binaries made on the spot, byte by byte, and by nvcc where there is one."""

import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from ray_eagle.preflight.kernels import BUILD, KernelFacts, check_kernels, kernel_facts, library_archs, support

H200, BLACKWELL = (9, 0), (12, 0)


def entry(kind: int, arch: int, payload: int = 40) -> bytes:
    head = struct.pack("<HHIQ", kind, 0x101, 64, payload) + bytes(12) + struct.pack("<I", arch) + bytes(32)
    assert len(head) == 64
    return head + b"\x7fELF".ljust(payload, b"\0")


def fatbin(*entries: bytes) -> bytes:
    body = b"".join(entries)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def test_every_fat_binary_of_a_library_is_walked(tmp_path: Path) -> None:
    library = tmp_path / "a.so"
    library.write_bytes(
        b"\x7fELF" + bytes(1000) + fatbin(entry(2, 80), entry(2, 90)) + bytes(77) + fatbin(entry(1, 120, 8)) + bytes(9)
    )
    assert library_archs(library) == ("sm_80", "sm_90", "compute_120")


@pytest.mark.parametrize("tail", [b"", b"\x50\xed\x55\xba", b"\x50\xed\x55\xba\1\0\x10\0", fatbin(entry(2, 90))[:40]])
def test_what_is_no_fat_binary_is_passed_over(tmp_path: Path, tail: bytes) -> None:
    library = tmp_path / "a.so"
    library.write_bytes(b"\x50\xed\x55\xba plain text " + fatbin(b"\7" * 64) + fatbin(entry(2, 75)) + tail)
    assert library_archs(library) == ("sm_75",)
    library.write_bytes(b"")
    assert library_archs(library) == ()


def test_what_nvcc_builds_is_read_as_asked(tmp_path: Path) -> None:
    nvcc = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
    if not nvcc:
        pytest.skip("no nvcc on this machine: the format is held by the hand-made files above")
    (tmp_path / "k.cu").write_text("__global__ void f(float* x) { x[threadIdx.x] *= 2; }\n")
    codes = ["arch=compute_80,code=sm_80", "arch=compute_90a,code=sm_90a", "arch=compute_90,code=[sm_90,compute_90]"]
    words = [nvcc, "-shared", "-Xcompiler", "-fPIC", *(w for c in codes for w in ("-gencode", c)), "k.cu", "-o", "k.so"]
    subprocess.run(words, cwd=tmp_path, check=True)
    assert library_archs(tmp_path / "k.so") == ("sm_80", "compute_90", "sm_90")


@pytest.mark.parametrize(
    ("archs", "capability", "expected"),
    [
        (["sm_80", "sm_90"], H200, "native"),
        (["sm_80", "sm_86"], (8, 9), "native"),
        (["sm_89"], (8, 6), "none"),
        (["sm_90"], BLACKWELL, "none"),
        (["sm_90", "compute_90"], BLACKWELL, "compiled at first use"),
        (["compute_120"], H200, "none"),
        (["sm_90a"], H200, "native"),
        (["sm_100a"], (10, 3), "none"),
        (["sm_100f"], (10, 3), "native"),
        (["compute_90a"], BLACKWELL, "none"),
        (["gfx942"], H200, "none"),
        ([], H200, "none"),
    ],
)
def test_support(archs: list[str], capability: tuple[int, int], expected: str) -> None:
    assert support(archs, capability) == expected


TORCH = ("sm_75", "sm_80", "sm_90", "sm_100", "sm_120")
SGLANG = {  # sglang-kernel 0.4.5, as read from its wheel
    "flash_ops": ("sm_80", "sm_86", "sm_90"),
    "flashmla_ops": ("sm_90", "sm_100", "sm_103"),
    "sm100/common_ops": ("sm_80", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120"),
    "sm90/common_ops": ("sm_80", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120"),
}


def facts(archs: tuple[str, ...] = TORCH, libraries: dict[str, tuple[str, ...]] | None = None) -> KernelFacts:
    return KernelFacts("/opt/python", {"torch": "2.11.0", "sgl_kernel": "0.4.5"}, "13.0", archs, libraries or {})


def found(given: KernelFacts, capability: tuple[int, int], driver: tuple[int, int] = (13, 0)) -> list[tuple[str, str]]:
    return [(f.level, f"{f.message} {f.fix}") for f in check_kernels("", given, {capability: "GPU"}, driver)]


def test_a_hopper_machine_has_all_it_needs() -> None:
    assert {level for level, _ in found(facts(libraries=SGLANG), H200)} == {"ok"}


def test_on_sm120_the_missing_attention_kernels_are_named() -> None:
    said = found(facts(libraries=SGLANG), BLACKWELL)
    assert [level for level, _ in said] == ["warning", "warning", "ok", "ok"]
    assert "flash_ops has code for sm_80, sm_86, sm_90, none for GPU (sm_120). It serves FA3 attention" in said[0][1]
    assert "MLA targets with another attention backend" in said[1][1]


def test_kernels_that_must_be_built_are_an_error_with_the_time_that_takes() -> None:
    (level, text), *_ = found(facts(libraries={"sm100/common_ops": ("sm_90", "sm_100")}), BLACKWELL)
    assert level == "error" and "none runs on GPU (sm_120)" in text and BUILD in text and "48 minutes" in text
    (level, text), *_ = found(facts(libraries={"sm100/common_ops": TORCH}), H200)
    assert level == "error" and "expected sm90/common_ops" in text


def test_torch_of_the_wrong_kind_is_an_error() -> None:
    ((level, text),) = found(facts(("sm_80", "sm_90")), BLACKWELL)
    assert level == "error" and "has kernels for sm_80, sm_90: none runs on GPU (sm_120)" in text
    ((level, text),) = found(facts(("sm_90", "compute_90")), BLACKWELL)
    assert level == "warning" and "only as PTX" in text
    ((level, text),) = found(KernelFacts("/p", {"torch": "2"}, "", (), {}), H200)
    assert level == "error" and "is a CPU build" in text


@pytest.mark.parametrize(("driver", "level"), [((12, 8), "error"), ((13, 0), "ok"), ((13, 1), "ok"), ((0, 0), "ok")])
def test_a_driver_older_than_torchs_cuda(driver: tuple[int, int], level: str) -> None:
    assert found(facts(), H200, driver)[0][0] == level


def test_a_newer_minor_cuda_is_a_warning() -> None:
    given = KernelFacts("/p", {"torch": "2"}, "13.2", TORCH, {})
    level, text = found(given, H200, (13, 0))[0]
    assert level == "warning" and "nothing that is compiled at first use" in text


def test_an_interpreter_is_asked_and_its_libraries_read(tmp_path: Path) -> None:
    package = tmp_path / "sgl_kernel"
    (package / "sm90").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('must not be imported')\n")
    (package / "sm90" / "common_ops.abi3.so").write_bytes(fatbin(entry(2, 90)))
    (package / "flash_ops.so").write_bytes(fatbin(entry(2, 80)))
    import torch

    answer = kernel_facts(sys.executable, {"PYTHONPATH": str(tmp_path)})
    assert answer.error == ""
    assert answer.libraries == {"sm90/common_ops": ("sm_90",), "flash_ops": ("sm_80",)}
    assert (answer.versions["torch"], answer.cuda) == (torch.__version__, torch.version.cuda or "")
    broken = kernel_facts(str(tmp_path / "python"))
    assert "No such file" in broken.error
    (finding,) = check_kernels("", broken, {H200: "GPU"}, (13, 0))
    assert finding.level == "error" and "does not answer" in finding.message
