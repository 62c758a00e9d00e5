"""Are the target and the given drafter whole, and do they fit each other? By configs and headers, and d2t alone."""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from ray_eagle.config import Config, TargetConfig
from ray_eagle.drafter.checkpoint import check_drafter
from ray_eagle.drafter.files import FLOAT_DTYPES, read_header
from ray_eagle.preflight.drafter import check_folder, passed
from ray_eagle.preflight.report import Finding
from ray_eagle.target.loading import TargetFacts, choose_dtype, load_tokenizer

INDEX = "model.safetensors.index.json"
DAMAGED = "Copy the target's folder again and compare file sizes with the source."


@dataclass(frozen=True)
class Weights:
    """The target's weights by their headers: tensor name -> (dtype, shape), and bytes of the files."""

    tensors: dict[str, tuple[str, tuple[int, ...]]]
    bytes: int

    def loaded_bytes(self, dtype: torch.dtype) -> int:
        """Bytes in memory when floating-point weights are loaded in `dtype` (quantised ones stay as they are)."""
        size = torch.empty((), dtype=dtype).element_size()
        return sum(
            math.prod(shape) * (size if name in FLOAT_DTYPES else _stored_bytes(name))
            for name, shape in self.tensors.values()
        )


def check_weights(facts: TargetFacts) -> tuple[list[Finding], Weights | None]:
    """Every file that the index names is there and whole, holds the tensors it should, and matches config.json.

    Raises CheckpointError for a truncated or damaged file.
    """
    index, single = facts.path / INDEX, facts.path / "model.safetensors"
    if index.exists():
        try:
            where: dict[str, str] = json.loads(index.read_text())["weight_map"]
        except (ValueError, KeyError, TypeError) as error:
            return [_error("target weights", f"{index} is damaged ({error!r}).", DAMAGED)], None
        files = sorted(set(where.values()))
    elif single.exists():
        where, files = {}, [single.name]
    else:
        found = sorted(p.name for p in facts.path.glob("*.bin")) or "none"
        fix = "Use a folder with safetensors; other formats are not read."
        message = f"{facts.path}: expected {single.name} or {INDEX}, found other weights: {found}."
        return [_error("target weights", message, fix)], None
    missing = [name for name in files if not (facts.path / name).is_file()]
    if missing:
        message = (
            f"{facts.path}: {len(missing)} of {len(files)} files of the index are missing: {', '.join(missing[:5])}."
        )
        return [_error("target weights", message, DAMAGED)], None
    headers = {name: read_header(facts.path / name) for name in files}
    strays = [f"{tensor} ({file})" for tensor, file in where.items() if tensor not in headers[file]]
    if strays:
        message = f"{facts.path}: {len(strays)} tensors of the index are not in their files, the first is {strays[0]}."
        return [_error("target weights", message, DAMAGED)], None
    tensors = {tensor: entry for header in headers.values() for tensor, entry in header.items()}
    weights = Weights(tensors, sum((facts.path / name).stat().st_size for name in files))
    findings = list(_check_shapes(facts, tensors))
    if not findings:
        message = (
            f"{len(tensors)} tensors in {len(files)} files, {facts.layers} layers, hidden size {facts.hidden_size}."
        )
        findings.append(Finding(level="ok", check="target weights", message=message))
    return findings, weights


def _check_shapes(facts: TargetFacts, tensors: dict[str, tuple[str, tuple[int, ...]]]) -> Iterator[Finding]:
    wanted = {"embed_tokens.weight": (facts.vocab_size, facts.hidden_size), "norm.weight": (facts.hidden_size,)}
    for suffix, shape in wanted.items():
        names = [name for name in tensors if name == suffix or name.endswith("." + suffix)]
        if not names:
            yield _error("target weights", f"{facts.path}: expected a tensor *.{suffix}, found none.", DAMAGED)
            continue
        name = min(names, key=len)
        if tensors[name][1] != shape:
            message = f"{facts.path}: {name}: expected {list(shape)} by config.json, found {list(tensors[name][1])}."
            yield _error("target weights", message, "Take config.json and weights from one download.")


def check_tokenizer(facts: TargetFacts, config: TargetConfig) -> list[Finding]:
    """The tokenizer loads, has a chat template and fits the vocabulary. Raises TargetError when it does not load."""
    tokenizer = load_tokenizer(facts, config)
    if len(tokenizer) > facts.vocab_size:
        message = f"{facts.path}: the tokenizer knows {len(tokenizer)} tokens, the model {facts.vocab_size}."
        if tokenizer.vocab_size > facts.vocab_size:
            return [_error("tokenizer", message, "Take the tokenizer of this model.")]
        fix = "Added tokens that no text holds do no harm (Gemma 3's image token): a sample with one is set aside."
        return [Finding(level="warning", check="tokenizer", message=message, fix=fix)]
    if tokenizer.eos_token_id is None:
        message = f"{facts.path}: the tokenizer names no end-of-sequence token: answers run to their limit."
        return [
            Finding(level="warning", check="tokenizer", message=message, fix="Set eos_token in tokenizer_config.json.")
        ]
    return [Finding(level="ok", check="tokenizer", message=f"{len(tokenizer)} tokens, chat template present.")]


def check_dtypes(config: Config) -> list[Finding]:
    """What `auto` becomes, and bfloat16 on a CPU that has to emulate it."""
    findings = []
    stages = (
        ("target.dtype", config.target.dtype, config.extract.gpus),
        ("serve.dtype", config.serve.dtype, config.serve.gpus),
    )
    for key, name, gpus in stages:
        device = torch.device("cuda" if gpus else "cpu")
        dtype = choose_dtype(name, device)
        message = f"{key} {name}: {str(dtype).removeprefix('torch.')} on {'GPUs' if gpus else 'the CPU'}."
        slow = not gpus and dtype == torch.bfloat16 and choose_dtype("auto", device) != torch.bfloat16
        findings.append(
            Finding(
                level="warning" if slow else "ok",
                check="dtype",
                message=message + (" This CPU has no bf16 instructions and emulates it." if slow else ""),
                fix=f"Set {key} to float32, or to auto." if slow else "",
            )
        )
    return findings


def check_given_drafter(path: str, facts: TargetFacts) -> list[Finding]:
    """As `ray-eagle drafter check`, and whether a run can train and serve it. Raises CheckpointError when it cannot."""
    folder = Path(path).expanduser().absolute()
    findings = check_folder(folder, facts)
    if not passed(findings):
        return findings
    ids = check_drafter(folder).aux_layers
    if ids != facts.aux_layers:
        findings.append(
            Finding(
                level="warning",
                check="aux layers",
                message=f"the drafter listens to {list(ids)}, but the settings capture {list(facts.aux_layers)}.",
                fix=f"Set target.aux_layers to {list(ids)} to fine-tune this drafter.",
            )
        )
    return findings


def _stored_bytes(dtype: str) -> int:
    """`I64` -> 8, `F8_E4M3` -> 1, `BOOL` -> 1."""
    digits = "".join(c for c in dtype.partition("_")[0] if c.isdigit())
    return max(1, int(digits or 8) // 8)


def _error(check: str, message: str, fix: str) -> Finding:
    return Finding(level="error", check=check, message=message, fix=fix)
