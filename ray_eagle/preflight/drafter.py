"""Will this drafter draft for this target, in this engine? From headers and configs, and the vocabulary map alone.

Each check is a pitfall that public tools leave silent: the drafter loads, and accepts nothing.
"""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from ray_eagle.drafter.contents import Contents, check_map, read_contents, read_map, tensor_faults
from ray_eagle.drafter.engines import MEASURE, Engine
from ray_eagle.drafter.files import FLOAT_DTYPES, read_config
from ray_eagle.drafter.names import EMBEDDING, MODEL
from ray_eagle.drafter.speculators import LAYERS, NESTED
from ray_eagle.drafter.variant import REORDER, Variant, in_order, read_variant, target_faults
from ray_eagle.errors import CheckpointError, EagleError
from ray_eagle.preflight.estimate import human_bytes
from ray_eagle.preflight.latent import latent_findings
from ray_eagle.preflight.report import Finding, Level
from ray_eagle.preflight.rope import rope_findings, rope_words
from ray_eagle.target.layers import layer_readings
from ray_eagle.target.sizes import TargetSizes


def check_folder(folder: Path, target: TargetSizes | None, engine: Engine | None = None) -> list[Finding]:
    """Every finding about the drafter; without `target` only about its own files."""
    try:
        variant = read_variant(folder, target.layers if target else None)
        contents = read_contents(folder, variant)
        config = read_config(folder)
    except EagleError as error:
        return [_told(error)]
    findings = [_told(error) for error in tensor_faults(variant, contents)]
    findings += [_told(error) for error in _map(variant, contents)] if not findings else []
    if target:
        findings += [_told(error) for error in target_faults(variant, target, folder / "config.json")]
    whole = not findings
    layer = _layer_config(config)
    findings += _config(folder, variant, layer)
    findings += _copies(folder, layer)
    rope = target.rope if target else None
    findings += rope_findings(variant.shape, layer, folder, rope, nested=variant.format == "speculators")
    findings += _options(folder, variant, engine)
    if engine:
        findings += _engine(folder, variant, contents, target, engine)
    if variant.shape.latent:
        findings += latent_findings(variant.shape, config, folder / "config.json", engine)
    if target:
        findings += _context(folder, variant, target)
        findings += _readings(variant, target, engine) if max(variant.shape.aux_layers) < target.layers else []
    return ([_description(folder, variant, contents, target)] if whole else []) + findings


def _told(error: EagleError) -> Finding:
    fix = getattr(error, "fix", "")
    return Finding(level="error", check="drafter", message=str(error).removesuffix(fix).rstrip(), fix=fix)


def _map(variant: Variant, contents: Contents) -> Iterator[CheckpointError]:
    try:
        d2t, t2d = read_map(variant, contents)
        check_map(d2t, t2d, contents.where)
    except CheckpointError as error:
        yield error


def _layer_config(config: dict[str, Any]) -> dict[str, Any]:
    """The part that holds the layer's settings."""
    nested = config.get(NESTED)
    return nested if isinstance(nested, dict) else config


def _description(folder: Path, variant: Variant, contents: Contents, target: TargetSizes | None) -> Finding:
    size = human_bytes(sum(tensor.bytes for tensor in contents.stored.values()))
    dtypes = " and ".join(sorted({t.dtype for t in contents.stored.values() if t.dtype in FLOAT_DTYPES}))
    fits = ", fits the target" if target else ""
    message = (
        f"{folder}: all tensors present ({size}, {dtypes}){fits}; {variant.shape.draft_vocab_size} draft tokens; "
        f"RoPE {rope_words(variant.shape.rope_parameters)}"
    )
    message += f" (the target: {rope_words(target.rope)})." if target else "."
    return Finding(level="ok", check="drafter", message=message)


def _config(folder: Path, variant: Variant, layer: dict[str, Any]) -> Iterator[Finding]:
    """Keys that contradict the tensors, or that engines trip over."""
    where, shape = folder / "config.json", variant.shape
    tell = _teller("drafter config")
    if shape.num_attention_heads % shape.num_key_value_heads:
        yield tell(
            "error",
            f"{where}: {shape.num_attention_heads} attention heads cannot share {shape.num_key_value_heads} key/value heads.",
            "Take config.json from the export that the weights come from.",
        )
    if shape.draft_vocab_size > shape.vocab_size:
        yield tell(
            "error",
            f"{where}: draft_vocab_size {shape.draft_vocab_size} is larger than vocab_size {shape.vocab_size}.",
            "Take config.json from the export that the weights come from.",
        )
    if layer.get("tie_word_embeddings"):
        yield tell(
            "error",
            f"{where}: tie_word_embeddings is true: SGLang then drafts with the embedding in place of lm_head.",
            "Set tie_word_embeddings to false.",
        )
    if variant.format == "sglang" and "draft_vocab_size" not in layer:
        yield tell(
            "warning",
            f"{where}: no draft_vocab_size: SGLang reads it without a default, and does not start.",
            f"Write draft_vocab_size: {shape.draft_vocab_size}.",
        )
    if not in_order(variant):
        yield Finding(
            level="error",
            check="aux layers",
            message=f"{where}: layer ids {list(variant.written_ids or ())}: expected three distinct ids, ascending: engines "
            "capture in layer order, once each, whatever stands here.",
            fix=REORDER,
        )
    if layer.get("quantization_config"):
        yield tell(
            "error",
            f"{where}: quantization_config is set, but the drafter is not quantised.",
            "Remove it: it was copied from the target.",
        )


def _copies(folder: Path, layer: dict[str, Any]) -> Iterator[Finding]:
    """Layer ids stand in `eagle_config`, at the top level, or in both."""
    eagle = layer.get("eagle_config")
    inner, outer = eagle.get(LAYERS) if isinstance(eagle, dict) else None, layer.get(LAYERS)
    if inner and outer and inner != outer:
        yield Finding(
            level="error",
            check="aux layers",
            message=f"{folder / 'config.json'}: {LAYERS} is {outer}, but {inner} in eagle_config: engines read one or the "
            "other.",
            fix="Find out which ones it was trained on, and write them in both places: ray-eagle drafter convert SRC DST "
            "--aux-layers does.",
        )


def _options(folder: Path, variant: Variant, engine: Engine | None) -> Iterator[Finding]:
    where, tell = folder / "config.json", _teller("drafter option")
    latent = variant.shape.latent is not None
    ignored = engine.ignored_options(latent=latent) if engine else frozenset({"norm_before_residual"})
    for option in sorted(variant.options & ignored):
        who = engine.name if engine else "SGLang"
        yield tell(
            "error" if engine else "warning",
            f"{where}: {option} is on, which {who} does not know: it would ignore it and accept next to nothing.",
            "Serve it with vLLM, which reads the option, or train a drafter without it.",
        )
    if "norm_output" in variant.options and variant.format == "sglang":
        yield tell(
            "warning",
            f"{where}: norm_output is on. To SGLang and vLLM it means that the normed state goes into the next step; "
            "SpecForge writes it and always feeds the un-normed one.",
            "Set it to false if SpecForge trained the drafter.",
        )


def _engine(
    folder: Path, variant: Variant, contents: Contents, target: TargetSizes | None, engine: Engine
) -> Iterator[Finding]:
    """What a certain engine does with the files."""
    tell, latent = _teller("engine"), variant.shape.latent is not None
    if engine.caveat:
        yield tell("warning", engine.caveat, MEASURE)
    head = contents.names.get("lm_head.weight", "")
    if skipped := engine.skipped_names(contents.naming, head.startswith(MODEL), latent=latent):
        yield tell(
            "error",
            f"{contents.where}: {engine.name} skips {skipped} without a word, and drafts with random weights.",
            "ray-eagle drafter convert SRC DST --to sglang writes the names that it reads.",
        )
    if engine.kind == "sglang" and NESTED in read_config(folder):
        yield tell(
            "error",
            f"{folder / 'config.json'}: speculators' format: SGLang does not look into {NESTED}.",
            "ray-eagle drafter convert SRC DST --to sglang",
        )
    if EMBEDDING in contents.stored and engine.kind == "sglang":
        yield tell(
            "ok",
            f"{contents.where}: carries {EMBEDDING} ({human_bytes(contents.stored[EMBEDDING].bytes)}); SGLang takes the "
            "target's.",
            "",
        )
    if not target or engine.kind != "sglang":
        return
    if target.latent_attention != latent:
        one, other = (
            ("drafter", f"target ({target.model_type})") if latent else (f"target ({target.model_type})", "drafter")
        )
        yield tell(
            "warning",
            f"the {one} has latent attention, the {other} has not: SGLang gives the drafter the target's attention "
            "backend, and may crash.",
            "Name another one for the drafter: --speculative-draft-attention-backend (serve.draft_attention).",
        )
    if target.quantised:
        yield tell(
            "warning",
            "the target is quantised, the drafter is not: SGLang may take the target's quantisation for both.",
            "Say --speculative-draft-model-quantization unquant.",
        )


def _context(folder: Path, variant: Variant, target: TargetSizes) -> Iterator[Finding]:
    if variant.shape.max_position_embeddings < target.max_position_embeddings:
        yield Finding(
            level="warning",
            check="drafter context",
            message=f"{folder}: max_position_embeddings is {variant.shape.max_position_embeddings}, the target's "
            f"{target.max_position_embeddings}: acceptance collapses on longer inputs.",
            fix="Set max_position_embeddings in the drafter's config.json to the context that is served.",
        )


def _readings(variant: Variant, target: TargetSizes, engine: Engine | None) -> Iterator[Finding]:
    """Which engines take other layers than the drafter was trained on, from the ids as they stand in the config."""
    tell = _teller("aux layers")
    outputs, model_type = list(variant.shape.aux_layers), target.model_type
    if variant.written_ids is None:
        yield tell(
            "warning",
            f"no layer ids in the config: engines then take the outputs of {outputs} of this target.",
            "If it was trained on these: ray-eagle drafter convert SRC DST --target TARGET writes them.",
        )
        return
    written = list(variant.written_ids)
    if engine:
        found = engine.reading(written, target.layers, model_type)
        if found != outputs:
            yield tell(
                "error",
                f"{engine.name} reads {written} on {model_type} as the outputs of {found}; to the tool that wrote it "
                f"they mean {outputs}.",
                f"ray-eagle drafter convert SRC DST --engine {engine.kind}=={engine.version or 'VERSION'} --target TARGET "
                "writes the ids that it reads so.",
            )
        else:
            yield tell("ok", f"{engine.name} reads {written} as the outputs of {outputs}.", "")
        return
    readings = layer_readings(written, target.layers, model_type)
    if variant.format == "speculators":
        readings = {name: reading for name, reading in readings.items() if name in ("vLLM", "speculators")}
    others = {name: reading for name, reading in readings.items() if reading != outputs}
    text = "; ".join(f"{name} takes the outputs of {reading}" for name, reading in others.items())
    if any(name.startswith("SGLang") for name in others):
        yield tell(
            "warning",
            f"ids {written} mean the outputs of {outputs} here, but on {model_type}: {text}.",
            "Serve with an engine that reads them as outputs, or translate them: ray-eagle drafter convert SRC DST "
            "--engine sglang==VERSION --target TARGET.",
        )
    elif others:  # always so: vLLM and speculators count inputs, and our serving translates for vLLM
        yield tell("ok", f"SGLang reads {written} as the outputs of {outputs}; {text}.", "")
    else:
        yield tell("ok", f"every engine reads {written} as the outputs of {outputs}.", "")


def _teller(check: str) -> Callable[[Level, str, str], Finding]:
    return lambda level, message, fix: Finding(level=level, check=check, message=message, fix=fix)


def passed(findings: Iterable[Finding]) -> bool:
    """No finding is an error."""
    return all(finding.level != "error" for finding in findings)
