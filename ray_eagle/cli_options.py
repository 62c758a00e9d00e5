"""Options that several commands share."""

from typing import Annotated, Any

import typer

from ray_eagle.config import Config, Section

ANY_SETTING = {"allow_extra_args": True, "ignore_unknown_options": True}
ConfigFile = Annotated[str | None, typer.Option("-c", "--config", help="YAML file with settings.")]
Preset = Annotated[str | None, typer.Option(help="Preset to start from (smollm2-cpu, kimi-k2.5).")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout instead of a table.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks.")]
Address = Annotated[
    str | None,
    typer.Option(help="Submit as a job to the Ray cluster whose dashboard is at this URL, and follow its log."),
]
InJob = Annotated[bool, typer.Option("--in-job", hidden=True)]


def settings_help(sections: tuple[str, ...]) -> str:
    """The settings that a stage reads, as flags, each with its default and documentation."""
    lines = ["Settings (as flags, or in the YAML file; `ray-eagle config show` lists all):\n"]
    for section in sections:
        kind: Any = Config.model_fields[section].annotation
        assert issubclass(kind, Section)
        for name, field in kind.model_fields.items():
            lines.append(f"\b\n--{section}.{name}  [{field.get_default()}]\n    {field.description}\n")
    return "\n".join(lines) if sections else "Any setting can be given as a flag: --train.lr 1e-3, --run FOLDER.\n"
