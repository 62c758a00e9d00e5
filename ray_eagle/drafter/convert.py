"""Write a drafter in another tool's format, tensor by tensor: bytes are copied, never converted, whatever the file's size.

What the other format has no place for is carried along, so that converting back gives the same tensors and settings.
"""

import errno
import json
import os
import struct
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from ray_eagle.drafter.contents import MAPS, Contents, check_map, read_contents, read_map, tensor_faults
from ray_eagle.drafter.engines import MEASURE, Engine
from ray_eagle.drafter.files import FLOAT_DTYPES, SAFETENSORS_DTYPES, WEIGHTS, fault, read_config, read_stored
from ray_eagle.drafter.names import EMBEDDING, LAYER_0, MIDLAYER, Naming
from ray_eagle.drafter.sglang import sglang_config
from ray_eagle.drafter.speculators import LAYERS, NESTED, speculators_config
from ray_eagle.drafter.variant import MARK, REORDER, Format, Outputs, Variant, in_order, read_variant, target_faults
from ray_eagle.errors import ConfigError, InputError, TargetError
from ray_eagle.run import replacing
from ray_eagle.target.sizes import TargetSizes
from ray_eagle.target.tensors import tensor_files

CHUNK = 16 << 20
"""Bytes copied at a time."""
CANNOT = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)
"""Errors of filesystems that cannot copy inside the kernel."""
CARRIED = "converted_from"
"""Key of a config in SGLang's format with speculators' own settings."""
ADDED = "ray_eagle_embedding"
"""Key of a Llama config in speculators' format whose embedding was copied from the target here, and goes on the way back."""
TORCH_NAMES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
STATED = ("architectures", "eagle_config", LAYERS, MARK, CARRIED, ADDED)
"""Keys of a config that are written anew."""


@dataclass(frozen=True)
class Converted:
    """What was written."""

    folder: Path
    format: Format
    outputs: tuple[int, ...]
    """Layer ids, as outputs of layers."""
    written_ids: tuple[int, ...]
    """As they stand in its config."""
    bytes: int
    notes: tuple[str, ...]
    """What differs from a copy, and what is not certain."""


def convert(
    source: Path,
    destination: Path,
    to: Format,
    *,
    engine: Engine | None = None,
    target: TargetSizes | None = None,
    outputs: Outputs | None = None,
) -> Converted:
    """Write the drafter of `source` into the new folder `destination`, in the format `to`.

    engine: translate the layer ids for it (SGLang's depend on the target). outputs: the layer ids, as outputs of layers,
    where the config says none or wrong ones. Memory: one chunk of 16 MiB, and the vocabulary map.

    Raises CheckpointError for a source that is damaged or made for another target, InputError where it cannot be said in that format or the
    destination is not empty, ConfigError for options that contradict each other.
    """
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise InputError(f"{destination}: expected no folder, or an empty one, found files. Name another destination.")
    if to == "speculators" and engine and engine.kind == "sglang":
        raise ConfigError("--engine sglang: expected --to sglang, found --to speculators, which SGLang does not read.")
    if engine and engine.kind == "sglang" and not target:
        raise ConfigError("--engine sglang: expected --target beside: how it reads layer ids depends on the target.")
    variant = read_variant(source, target.layers if target else None, outputs)
    if to == "speculators" and variant.shape.latent:
        raise InputError(
            f"{source}: --to speculators: expected a Llama layer, which is all that speculators knows, found latent "
            "attention. vLLM reads SGLang's format: --to sglang --engine vllm."
        )
    if not in_order(variant):
        found, expected = list(variant.written_ids or ()), "three distinct ids, ascending"
        raise fault(
            "drafter config", where=f"{source}/config.json, {LAYERS}", expected=expected, found=found, fix=REORDER
        )
    contents = read_contents(source, variant)
    for problem in tensor_faults(variant, contents):
        raise problem
    for problem in target_faults(variant, target, source / "config.json") if target else ():
        raise problem
    maps, notes = _maps(variant, contents, to)
    config = read_config(source)
    if to == "speculators":
        contents, added = _with_embedding(contents, target, notes)
    else:
        contents, added = _without_embedding(contents, config), False
    ids = _ids(variant, to, engine, target)
    config = _config(config, variant, contents, to, ids, engine, target)
    if added:
        config[NESTED][ADDED] = "copied from the target"
    destination.mkdir(parents=True, exist_ok=True)
    naming = Naming(LAYER_0 if to == "speculators" else MIDLAYER, prefix=False)
    size = _write(contents, maps, naming, destination / WEIGHTS)
    with replacing(destination / "config.json") as sink:
        sink.write((json.dumps(config, indent=2) + "\n").encode())
    written = read_variant(destination)
    for problem in tensor_faults(written, read_contents(destination, written)):
        raise problem
    if written.shape != variant.shape or written.options != variant.options:
        raise InputError(f"{source}: expected a config that {to} can hold, found one that reads otherwise there.")
    notes += [f"left out {name}: a copy of the target's" for name in contents.unused]
    if engine and engine.caveat:
        notes.append(f"{engine.caveat} {MEASURE}")
    return Converted(destination, to, variant.shape.aux_layers, tuple(ids), size, tuple(notes))


def _maps(variant: Variant, contents: Contents, to: Format) -> tuple[dict[str, bytes], list[str]]:
    """Maps to write besides the stored ones: a t2d that follows from d2t. The maps are checked on the way."""
    d2t, t2d = read_map(variant, contents)
    if MAPS & contents.stored.keys():
        check_map(d2t, t2d, contents.where)
    whole = variant.shape.draft_vocab_size == variant.shape.vocab_size
    if whole and to == "speculators" and bool(d2t.any()):
        raise InputError(
            f"{contents.where}: a map that reorders the whole vocabulary: expected draft ids equal to the target's, which "
            "is all that speculators knows there, found others. Keep the drafter in SGLang's format."
        )
    if "d2t" in contents.stored and "t2d" not in contents.stored and not whole:
        return {"t2d": t2d.tobytes()}, ["made t2d from d2t"]
    return {}, []


def _with_embedding(contents: Contents, target: TargetSizes | None, notes: list[str]) -> tuple[Contents, bool]:
    """With the target's embedding, and whether it was added here.

    vLLM takes the target's where there is none; speculators 0.9.0 takes it only if memory it never wrote happens to hold NaN.
    """
    if EMBEDDING in contents.stored:
        return contents, False
    if not target:
        notes.append("no embedding: vLLM takes the target's, speculators needs it in the file; say --target to copy it")
        return contents, False
    try:
        files = tensor_files(target.path)
    except TargetError as error:
        notes.append(f"no embedding: {error}")
        return contents, False
    name = min((name for name in files if name == EMBEDDING or name.endswith(f".{EMBEDDING}")), key=len, default="")
    found = read_stored(files[name])[name] if name else None
    if found is None or found.dtype not in FLOAT_DTYPES or found.shape != (target.vocab_size, target.hidden_size):
        notes.append(f"no embedding: {target.path} has none that could be copied; vLLM takes the target's")
        return contents, False
    notes.append(f"copied {name} of the target, as speculators does")
    stored, names = contents.stored | {EMBEDDING: found}, contents.names | {EMBEDDING: EMBEDDING}
    return replace(contents, stored=stored, names=names), True


def _without_embedding(contents: Contents, config: dict[str, Any]) -> Contents:
    """Without the embedding that `_with_embedding` had added."""
    nested = config.get(NESTED)
    if not isinstance(nested, dict) or ADDED not in nested:
        return contents
    return replace(contents, stored={name: t for name, t in contents.stored.items() if name != EMBEDDING})


def _ids(variant: Variant, to: Format, engine: Engine | None, target: TargetSizes | None) -> list[int]:
    outputs = list(variant.shape.aux_layers)
    if to == "speculators" or (engine and engine.kind == "vllm"):
        return [layer + 1 for layer in outputs]
    return engine.ids_for(outputs, target.layers, target.model_type) if engine and target else outputs


def _config(
    source: dict[str, Any],
    variant: Variant,
    contents: Contents,
    to: Format,
    ids: list[int],
    engine: Engine | None,
    target: TargetSizes | None,
) -> dict[str, Any]:
    nested = source.get(NESTED) if variant.format == "speculators" else source
    assert isinstance(nested, dict)  # by read_variant
    dtype = next(TORCH_NAMES[t.dtype] for t in contents.stored.values() if t.dtype in TORCH_NAMES)
    layer = sglang_config(variant.shape, dtype)
    layer |= {key: value for key, value in nested.items() if key not in layer and key not in STATED}
    eagle = {key: value for key, value in (nested.get("eagle_config") or {}).items() if key != LAYERS}
    options: dict[str, Any] = dict.fromkeys(sorted(variant.options), True)
    if variant.target_hidden_size != variant.shape.hidden_size:
        options["target_hidden_size"] = variant.target_hidden_size
    if variant.own_embedding:
        options["embed_requires_grad"] = True
    own = {key: value for key, value in source.items() if key not in (NESTED, LAYERS, "architectures", MARK)}
    if to == "sglang":
        layer |= options
        layer["eagle_config"] = {**layer["eagle_config"], **eagle, LAYERS: ids}
        layer[LAYERS] = ids
        if variant.format == "speculators":
            layer[CARRIED] = own
        elif CARRIED in source:
            layer[CARRIED] = source[CARRIED]
        if ids != list(variant.shape.aux_layers):
            layer[MARK] = {"outputs": list(variant.shape.aux_layers), "written": ids, "engine": engine and engine.name}
        return layer
    for key in ("architectures", LAYERS, *options):
        layer.pop(key, None)
    layer["eagle_config"] = eagle
    carried = own if variant.format == "speculators" else source.get(CARRIED) or {}
    verifier = (carried.get("speculators_config") or {}).get("verifier") or {}
    named = verifier.get("name_or_path"), list(verifier.get("architectures") or [])
    if target:  # by its whole path: the drafter is read from other directories
        named = str(target.path.absolute()), list(target.architectures)
    made = speculators_config(layer, ids, options, named)
    if not target and "speculators_config" in carried:
        made["speculators_config"] = carried["speculators_config"]
    return {**{key: value for key, value in carried.items() if key not in made}, **made}


def _write(contents: Contents, maps: dict[str, bytes], naming: Naming, path: Path) -> int:
    """The file as safetensors writes it: wide dtypes first, so that every tensor is aligned. Returns its bytes."""
    sizes = {name: (tensor.dtype, tensor.shape, tensor.bytes) for name, tensor in contents.stored.items()}
    sizes |= {name: ("BOOL", (len(data),), len(data)) for name, data in maps.items()}
    order = sorted(sizes, key=lambda name: (-SAFETENSORS_DTYPES[sizes[name][0]], naming.there(name)))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in order:
        dtype, shape, size = sizes[name]
        header[naming.there(name)] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end := end + size]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with ExitStack() as opened, replacing(path) as sink:
        files = {file: opened.enter_context(file.open("rb")) for file in {t.file for t in contents.stored.values()}}
        sink.write(struct.pack("<Q", len(text)) + text)
        for name in order:
            if name in maps:
                sink.write(maps[name])
            else:
                tensor = contents.stored[name]
                _copy(files[tensor.file], tensor.start, tensor.bytes, sink)
    return path.stat().st_size


def _copy(stream: BinaryIO, start: int, size: int, sink: BinaryIO) -> None:
    """Append bytes of a file; a drafter's gigabytes do not pass through this process where the filesystem can copy."""
    sink.flush()
    at, end = start, start + size
    while at < end:
        copied = _copy_inside(stream, at, end - at, sink) or _copy_through(stream, at, end - at, sink)
        if not copied:
            raise InputError(
                f"{stream.name}: expected {end - at} more bytes, found the end. The file changed meanwhile."
            )
        at += copied


def _copy_inside(stream: BinaryIO, at: int, size: int, sink: BinaryIO) -> int:
    """Bytes that the kernel copied; 0 where it cannot."""
    try:
        return os.copy_file_range(stream.fileno(), sink.fileno(), size, at)
    except OSError as error:
        if error.errno in CANNOT:
            return 0
        raise


def _copy_through(stream: BinaryIO, at: int, size: int, sink: BinaryIO) -> int:
    stream.seek(at)
    written = sink.write(stream.read(min(CHUNK, size)))
    sink.flush()
    return written
