"""Do the installed kernels run on these GPUs? Read from the files, before anything is loaded.

A CUDA library holds machine code for some architectures (sm_90), and perhaps PTX (compute_90), which the driver compiles
for newer ones at first use. Nothing else runs, and the error comes at the first launch, after the model was loaded. The
founding case had SM120 GPUs: SGLang's kernels had to be built there, which took 48 minutes.
"""

import json
import mmap
import os
import struct
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ray_eagle.preflight.report import Finding

ASK_S = 180.0
BUILD = "Building SGLang's kernels on an SM120 machine took 48 minutes: do it before the machines are paid for."
FATBIN = struct.pack("<I", 0xBA55ED50)
_HEADER = struct.Struct("<IHHQ")
_ENTRY = struct.Struct("<HHIQ")
_ARCH_AT = 28
PTX, ELF = 1, 2
NEEDED_FOR = {
    "flash_ops": "FA3 attention: serve with another attention backend (triton, flashinfer)",
    "flashmla_ops": "FlashMLA attention: serve MLA targets with another attention backend (triton, flashinfer)",
    "infllm_ops": "InfLLM sparse attention alone",
    "spatial_ops": "splitting a GPU between prefill and decode alone",
}
"""SGLang's libraries beside common_ops, and who misses them."""
_SCRIPT = """
import importlib.metadata, importlib.util, json, sys
def version(*names):
    for name in names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            pass
    return ""
import torch
cuda = torch.version.cuda or ""
spec = importlib.util.find_spec("sgl_kernel")
print(json.dumps({
    "versions": {"python": sys.version.split()[0], "torch": version("torch"), "sglang": version("sglang"),
                 "sgl_kernel": version("sglang-kernel", "sgl-kernel"), "flashinfer": version("flashinfer-python"),
                 "transformers": version("transformers")},
    "cuda": cuda,
    "archs": torch._C._cuda_getArchFlags().split() if cuda and hasattr(torch._C, "_cuda_getArchFlags") else [],
    "sgl_kernel": spec.origin if spec else "",
}))
"""

Support = Literal["native", "compiled at first use", "none"]


@dataclass(frozen=True)
class KernelFacts:
    """What an interpreter has installed."""

    interpreter: str
    versions: dict[str, str]
    """Package -> version; empty where it is absent."""
    cuda: str
    """The CUDA that torch was built for; empty for a CPU build."""
    torch_archs: tuple[str, ...]
    libraries: dict[str, tuple[str, ...]]
    """SGLang's kernel libraries, `sm90/common_ops` -> architectures."""
    error: str = ""
    """Why the interpreter did not answer; empty when it did."""


def kernel_facts(interpreter: str, environment: Mapping[str, str] | None = None) -> KernelFacts:
    """Ask an interpreter (torch is imported there, no CUDA context is made) and read the kernel libraries' headers."""
    try:
        done = subprocess.run(
            [interpreter, "-c", _SCRIPT],
            env=dict(os.environ if environment is None else environment) | {"CUDA_VISIBLE_DEVICES": ""},
            capture_output=True,
            text=True,
            timeout=ASK_S,
            check=True,
        )
        answer = json.loads(done.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        last = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
        return KernelFacts(interpreter, {}, "", (), {}, error=last[-1] if last else type(error).__name__)
    folder = Path(answer["sgl_kernel"]).parent if answer["sgl_kernel"] else None
    files = sorted(folder.rglob("*.so")) if folder else []
    return KernelFacts(
        interpreter=interpreter,
        versions=answer["versions"],
        cuda=answer["cuda"],
        torch_archs=tuple(answer["archs"]),
        libraries={_library(file, folder): library_archs(file) for file in files if folder},
    )


def library_archs(path: Path) -> tuple[str, ...]:
    """Architectures of the CUDA code in a shared library: sm_N for machine code, compute_N for PTX.

    Walks the fat binaries (what `cuobjdump --list-elf` lists) by their headers: a library of 1.1 GB takes 0.1 s.
    """
    if not path.stat().st_size:
        return ()
    found: set[tuple[int, int]] = set()
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as data:
        at = data.find(FATBIN)
        while at != -1:
            after = at + len(FATBIN)
            if at + _HEADER.size <= len(data):
                _, version, header, size = _HEADER.unpack_from(data, at)
                if version == 1 and header == _HEADER.size:
                    after = max(after, _walk(data, at + header, min(at + header + size, len(data)), found))
            at = data.find(FATBIN, after)
    return tuple(f"{'compute' if kind == PTX else 'sm'}_{arch}" for kind, arch in sorted(found, key=lambda k: k[::-1]))


def _walk(data: mmap.mmap, at: int, end: int, found: set[tuple[int, int]]) -> int:
    """Collect the (kind, architecture) of each entry from `at` on; where it stopped."""
    while at + _ARCH_AT + 4 <= end:
        kind, _, header, size = _ENTRY.unpack_from(data, at)
        if kind not in (PTX, ELF) or not _ARCH_AT < header <= 4096:
            break
        found.add((kind, struct.unpack_from("<I", data, at + _ARCH_AT)[0]))
        at += header + size
    return min(at, end)


def support(archs: Sequence[str], capability: tuple[int, int]) -> Support:
    """Whether code for these architectures runs on a GPU of this compute capability.

    Machine code runs within a major version, from its own minor version up (sm_100a and sm_90a only on just that one);
    PTX on everything at least as new (not compute_90a).
    """
    found: Support = "none"
    for arch in archs:
        kind, _, number = arch.partition("_")
        exact, family = number.endswith("a"), number.endswith("f")
        digits = number.rstrip("af")
        if not digits.isdigit():
            continue
        major, minor = int(digits[:-1]), int(digits[-1])
        if kind == "sm" and major == capability[0] and (minor == capability[1] if exact else minor <= capability[1]):
            return "native"
        if kind == "compute" and not exact and not family and (major, minor) <= capability:
            found = "compiled at first use"
    return found


def check_kernels(
    where: str, facts: KernelFacts, gpus: Mapping[tuple[int, int], str], driver: tuple[int, int]
) -> list[Finding]:
    """`gpus`: compute capability -> name of a GPU of this node; `driver`: the newest CUDA that its driver runs."""
    if facts.error:
        message = f"{where}{facts.interpreter} does not answer: {facts.error}."
        return [Finding(level="error", check="kernels", message=message, fix="Check that interpreter and its torch.")]
    torch = f"{where}torch {facts.versions['torch']} of {facts.interpreter}"
    if not facts.cuda:
        fix = "Install a CUDA build of torch there (https://pytorch.org), or set the gpus of the stages to 0."
        return [Finding(level="error", check="kernels", message=f"{torch} is a CPU build.", fix=fix)]
    findings = list(_check_driver(torch, facts.cuda, driver))
    for capability, name in gpus.items():
        sm = f"sm_{capability[0]}{capability[1]}"
        kind = support(facts.torch_archs, capability)
        if kind == "none":
            message = f"{torch} has kernels for {_list(facts.torch_archs)}: none runs on {name} ({sm})."
            findings.append(_error(message, f"Install a build of torch that lists {sm}."))
            continue
        findings += _check_libraries(where, facts, capability, name)
        note = (
            "" if kind == "native" else f" only as PTX: the first launches compile, for minutes; {sm} is not among them"
        )
        message = f"{torch} (CUDA {facts.cuda}) runs on {name} ({sm}){note}."
        findings.append(Finding(level="ok" if kind == "native" else "warning", check="kernels", message=message))
    return findings


def _check_libraries(where: str, facts: KernelFacts, capability: tuple[int, int], name: str) -> list[Finding]:
    """SGLang's own kernels: without common_ops nothing starts, without another library one backend is missing."""
    sm = f"sm_{capability[0]}{capability[1]}"
    # the loader takes sm90/ on Hopper alone, and sm100/ on everything else
    wanted = "sm90/common_ops" if capability == (9, 0) else "sm100/common_ops"
    used = wanted if wanted in facts.libraries else "common_ops"
    found = f"{where}SGLang's kernels {facts.versions.get('sgl_kernel')}".rstrip()
    if not facts.libraries:
        return []
    if used not in facts.libraries:
        return [_error(f"{found}: expected {wanted} for {name} ({sm}), found none.", f"Reinstall them. {BUILD}")]
    findings = []
    archs = facts.libraries[used]
    if support(archs, capability) == "none":
        message = f"{found}: {used} has code for {_list(archs)}: none runs on {name} ({sm})."
        return [_error(message, f"Install a release that lists {sm}, or build them. {BUILD}")]
    for library, others in facts.libraries.items():
        if library.endswith("common_ops") or not others or support(others, capability) != "none":
            continue
        message = f"{found}: {library} has code for {_list(others)}, none for {name} ({sm})."
        fix = f"It serves {NEEDED_FOR.get(library, 'some operations')}."
        findings.append(Finding(level="warning", check="kernels", message=message, fix=fix))
    message = f"{found}: {used} runs on {name} ({sm})."
    return [*findings, Finding(level="ok", check="kernels", message=message)]


def _check_driver(torch: str, cuda: str, driver: tuple[int, int]) -> list[Finding]:
    major, minor = (int(part) for part in cuda.split(".")[:2])
    if driver == (0, 0) or (major, minor) <= driver:
        return []
    message = f"{torch} was built for CUDA {cuda}; the driver runs {driver[0]}.{driver[1]}"
    if major > driver[0]:
        return [_error(f"{message}: no kernel starts.", "Update the driver, or install a torch for an older CUDA.")]
    fix = "Kernels run, but nothing that is compiled at first use (Triton, PTX): update the driver if that fails."
    return [Finding(level="warning", check="driver", message=message + ".", fix=fix)]


def _library(file: Path, folder: Path) -> str:
    return str(file.relative_to(folder).with_name(file.name.partition(".")[0]))


def _list(archs: Sequence[str]) -> str:
    return ", ".join(archs) or "nothing"


def _error(message: str, fix: str) -> Finding:
    return Finding(level="error", check="kernels", message=message, fix=fix)
