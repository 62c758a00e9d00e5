"""`ray-eagle drafter show|check|convert`: look at a drafter folder, ask whether it will draft, and translate it."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.table import Table

from ray_eagle.cli_options import Debug, Json, explained
from ray_eagle.errors import ConfigError

if TYPE_CHECKING:
    from ray_eagle.drafter.show import Description
    from ray_eagle.preflight.report import Finding
    from ray_eagle.target.sizes import TargetSizes

drafter_app = typer.Typer(help="Look at a drafter, check it, convert it.", no_args_is_help=True)
Folder = Annotated[Path, typer.Argument(help="Folder with config.json and safetensors.")]
TargetPath = Annotated[str | None, typer.Option("--target", help="The target: a model folder.")]
EngineName = Annotated[
    str | None,
    typer.Option("--engine", help="sglang[==X.Y.Z], vllm[==X.Y.Z] or reference; without a version the newest known."),
]
LEVELS = {"ok": "green", "warning": "yellow", "error": "bold red"}


@drafter_app.command("show", help="What a drafter is: format, sizes, layers, RoPE, vocabulary, tensors. Headers only.")
def drafter_show(folder: Folder, json_output: Json = False, debug: Debug = False) -> None:
    with explained(debug):
        from ray_eagle.drafter.show import describe, to_json

        shown = describe(folder.expanduser())
        if json_output:
            print(json.dumps(to_json(shown)))
            return
        console = _console()
        console.print(_summary(shown))
        table = Table("tensor", "shape", "dtype")
        for name, tensor in sorted(shown.tensors.items()):
            table.add_row(name, " x ".join(map(str, tensor.shape)), tensor.dtype)
        console.print(table)


@drafter_app.command(
    "check", help="Will it draft for this target, in this engine? Exit code 1 when something is wrong."
)
def drafter_check(
    folder: Folder,
    target: TargetPath = None,
    engine: EngineName = None,
    json_output: Json = False,
    debug: Debug = False,
) -> None:
    with explained(debug):
        from ray_eagle.drafter.engines import parse_engine
        from ray_eagle.preflight.drafter import check_folder, passed

        named = parse_engine(engine) if engine else None
        fits = _sizes(target) if target else None
        findings = check_folder(folder.expanduser(), fits, named)
        if json_output:
            found = {"drafter": str(folder), "target": target, "engine": named.name if named else None}
            listed = [finding.model_dump() for finding in findings]
            print(json.dumps({**found, "ok": passed(findings), "findings": listed}))
        else:
            _print_findings(findings)
        if not passed(findings):
            raise typer.Exit(1)


@drafter_app.command("convert", help="Write it in another format, tensor by tensor, layer ids translated.")
def drafter_convert(
    source: Folder,
    destination: Annotated[Path, typer.Argument(help="New folder.")],
    to: Annotated[Literal["sglang", "speculators"], typer.Option("--to", help="Format to write.")] = "sglang",
    engine: EngineName = None,
    target: TargetPath = None,
    aux_layers: Annotated[
        str | None,
        typer.Option(help="Its layers as outputs, 0-based (2,30,58), where the config says none or wrong ones."),
    ] = None,
    json_output: Json = False,
    debug: Debug = False,
) -> None:
    with explained(debug):
        from ray_eagle.drafter.convert import convert
        from ray_eagle.drafter.engines import parse_engine

        written = convert(
            source.expanduser(),
            destination.expanduser(),
            to,
            engine=parse_engine(engine) if engine else None,
            target=_sizes(target) if target else None,
            outputs=_three(aux_layers) if aux_layers else None,
        )
        if json_output:
            found = {"folder": str(written.folder), "format": written.format, "aux_layers": written.outputs}
            print(
                json.dumps(
                    {**found, "written_ids": written.written_ids, "bytes": written.bytes, "notes": written.notes}
                )
            )
            return
        ids = f"layer ids {list(written.written_ids)} (outputs of {list(written.outputs)})"
        print(f"{written.folder}: {written.format}, {_bytes(written.bytes)}, {ids}")
        for note in written.notes:
            print(f"  {note}")


def _summary(shown: "Description") -> Table:
    from ray_eagle.drafter.show import readings
    from ray_eagle.preflight.rope import rope_words

    table = Table("drafter", str(shown.folder))
    table.add_row("format", f"{shown.format}: {shown.family}")
    if shown.problem:
        table.add_row("not trainable", shown.problem)
    table.add_row("size", f"{_bytes(shown.bytes)}, {shown.parameters:,} parameters, {len(shown.tensors)} tensors")
    if variant := shown.variant:
        shape = variant.shape
        heads = f"{shape.num_attention_heads} heads, {shape.num_key_value_heads} key/value heads of {shape.head_dim}"
        if sizes := shape.latent:
            ranks = f"ranks {sizes.q_lora_rank or 'none'} (queries) and {sizes.kv_lora_rank}"
            widths = f"{sizes.qk_nope_head_dim} + {sizes.qk_rope_head_dim} (rotated), values {sizes.v_head_dim}"
            heads = f"{shape.num_attention_heads} heads of {widths}, {ranks}"
        table.add_row("layer", f"hidden {shape.hidden_size}, MLP {shape.intermediate_size}, {heads}")
        if variant.target_hidden_size != shape.hidden_size:
            table.add_row("aux states", f"{variant.target_hidden_size} wide each")
        table.add_row("context", f"{shape.max_position_embeddings:,}")
        table.add_row("RoPE", rope_words(shape.rope_parameters))
        maps = " and ".join(shown.maps) or "no map"
        table.add_row("vocabulary", f"{shape.draft_vocab_size:,} of {shape.vocab_size:,} tokens ({maps})")
        table.add_row("options", ", ".join(sorted(variant.options)) or "none")
        table.add_row(
            "layer ids", str(list(variant.written_ids)) if variant.written_ids else "no list of them in the config"
        )
        if variant.translated_for:
            table.add_row("  written for", f"{variant.translated_for}: outputs of {list(shown.outputs or ())}")
        else:
            for who, outputs in readings(shown):
                table.add_row(f"  {who}", f"outputs of {outputs}")
    table.add_row("embedding", "a copy of the target's, or its own" if shown.embedding else "the target's")
    return table


def _print_findings(findings: "list[Finding]") -> None:
    console = _console()
    for finding in findings:
        console.print(f"[{LEVELS[finding.level]}]{finding.level:8}[/] ", end="")
        console.print(f"{finding.check}: {finding.message}", markup=False, highlight=False, soft_wrap=True)
        if finding.fix and finding.level != "ok":
            console.print(f"         -> {finding.fix}", markup=False, highlight=False, soft_wrap=True)


def _console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=160)


def _bytes(count: int) -> str:
    from ray_eagle.preflight.estimate import human_bytes

    return human_bytes(count)


def _sizes(target: str) -> "TargetSizes":
    from ray_eagle.target.sizes import read_target

    folder = Path(target).expanduser()
    if (folder / "config.json").is_file():
        return read_target(folder)
    from ray_eagle.config import TargetConfig
    from ray_eagle.target.loading import resolve_target

    return read_target(resolve_target(TargetConfig(path=target)))


def _three(text: str) -> tuple[int, int, int]:
    try:
        first, second, third = (int(part) for part in text.strip("[] ").split(","))
    except ValueError:
        first = second = third = -1
    if not 0 <= first < second < third:
        raise ConfigError(f"--aux-layers: expected three ids, ascending, as 2,30,58, found {text!r}.")
    return first, second, third
