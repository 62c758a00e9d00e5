"""Options that several commands share, and how they end when something is wrong."""

import errno
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
from pydantic.fields import FieldInfo

from ray_eagle.config import Config, Section
from ray_eagle.errors import ConfigError, EagleError, explain
from ray_eagle.settings import as_yaml

INDENT = "    "
STOPPED = "stopped: what was committed is kept, and the same command goes on from there"
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


def settings_help(sections: tuple[str, ...], whole_run: tuple[str, ...] = ()) -> str:
    """The settings that a stage reads, as flags, each with its default, its choices and its documentation.

    `whole_run`: those that belong to no section.
    """
    lines = ["Settings and their defaults (as flags, or in the YAML file; `ray-eagle config show` lists all):\n"]
    if not sections:
        lines = ["Any setting can be given as a flag: --train.lr 1e-3, --run FOLDER.\n"]
    lines += [_setting_help(f"--{name.replace('_', '-')}", Config.model_fields[name]) for name in whole_run]
    for section in sections:
        kind: Any = Config.model_fields[section].annotation
        assert issubclass(kind, Section)
        lines += [_setting_help(f"--{section}.{name}", field) for name, field in kind.model_fields.items()]
    return "\n".join(lines)


def _setting_help(flag: str, field: FieldInfo) -> str:
    choices = " | ".join(_choices(field.annotation))
    default = as_yaml(field.get_default()) + (f"  ({choices})" if choices else "")
    described = " ".join((field.description or "").split())
    return f"\b\n{flag} {default}\n{textwrap.fill(described, 76, initial_indent=INDENT, subsequent_indent=INDENT)}\n"


def _choices(kind: Any) -> list[str]:
    """The words that a setting, or each item of it, takes; empty where it is not bound to some."""
    if get_origin(kind) is Literal:
        return [as_yaml(choice) for choice in get_args(kind)]
    return [choice for part in get_args(kind) for choice in _choices(part)]


@contextmanager
def explained(debug: bool, stopped: str = STOPPED) -> Iterator[None]:
    """Turn our errors and the system's into one message and an exit code; a traceback only with --debug.

    `stopped`: what to say after Ctrl-C.
    """
    try:
        yield
    except EagleError as error:
        if debug:
            raise
        sys.stderr.write(f"error: {error}\n")
        raise typer.Exit(2 if isinstance(error, ConfigError) else 1) from None
    except OSError as error:
        if debug or error.errno == errno.EPIPE:  # whoever read our output has gone: typer ends quietly
            raise
        sys.stderr.write(f"error: {_refused(error)}\n")
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        sys.stderr.write(f"{stopped}\n")
        raise typer.Exit(130) from None


def _refused(error: OSError) -> str:
    """What the system would not do, on one line. Only some errors know the path apart from their text."""
    error = getattr(error, "cause", error)  # of a Ray task: its own text is the worker's traceback
    said = " ".join(str(error).split())
    if isinstance(error, (TimeoutError, ConnectionError)) and error.filename is None:  # no file, but another process
        return explain(
            "no answer",
            where=type(error).__name__,
            expected="another process to answer in time",
            found=said or "silence",
            fix="Run the same command again; --debug shows where it happened.",
        )
    return explain(
        "reading or writing failed",
        where=type(error).__name__ if error.filename is None else error.filename,
        expected="a place that can be read and written",
        found=said if error.filename is None else error.strerror,
        fix="Make room or allow it there, or name another place; --debug shows where it happened.",
    )
