"""`ray-eagle preflight --gpus` and `--free-gpus`: who is on the GPUs, and ending what was left there."""

import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, TextIO

import typer
from rich.console import Console

from ray_eagle.config import Config
from ray_eagle.errors import ConfigError, EagleError

if TYPE_CHECKING:
    from ray_eagle.preflight.gpus import Holder

Gpus = Annotated[bool, typer.Option("--gpus", help="Only list who is on the GPUs of every node.")]
FreeGpus = Annotated[
    bool, typer.Option("--free-gpus", help="End what ray_eagle left behind on GPUs, and wait for the memory.")
]
Pids = Annotated[list[str] | None, typer.Option("--pid", help="With --free-gpus: end this one too (PID or HOST:PID).")]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask before ending what --pid names.")]


def gpu_flags(gpus: bool, free_gpus: bool, pids: Sequence[str] | None, yes: bool) -> list[str]:
    """The words that say the same again, for a job; none when preflight is to run as usual. Raises ConfigError."""
    if (pids or yes) and not free_gpus:
        raise ConfigError("--pid and --yes: expected --free-gpus beside, found none. Add it.")
    named = [word for pid in pids or () for word in ("--pid", pid)]
    return ["--gpus"] * gpus + ["--free-gpus"] * free_gpus + named + ["--yes"] * yes


def gpus_command(
    config: Config, end_stale: bool, pids: Sequence[str], sure: bool, json_output: bool, out: TextIO
) -> None:
    """List who is on the GPUs of every node; with `end_stale` end ours that were left behind, and `pids` once confirmed.

    Exits with 1 when something that was to be ended is still there.
    """
    from ray_eagle import cluster
    from ray_eagle.preflight.freeing import free_nodes, look_at_nodes, named, stale
    from ray_eagle.report.gpus import freed_json, freed_words, node_json, render_gpus

    cluster.connect(config.ray)
    nodes = look_at_nodes()
    freed = {}
    if end_stale:
        chosen = named(nodes, pids)
        others = [holder for holders in chosen.values() for holder in holders if not holder.standing.stale]
        if others and not sure:
            confirm(others)
        wanted = {key: [h.process for h in [*stale(node), *chosen.get(key, [])]] for key, node in nodes.items()}
        freed = free_nodes({key: list(dict.fromkeys(each)) for key, each in wanted.items() if each})
    left = nodes | {key: each.left for key, each in freed.items()}
    if json_output:
        found = {"freed": [freed_json(each) for each in freed.values()], "nodes": [node_json(n) for n in left.values()]}
        print(json.dumps(found), file=out)
    else:
        if end_stale:
            print("\n".join(map(freed_words, freed.values())) or "Nothing of ours was left behind.", file=out)
        Console(file=out, width=None if out.isatty() else 160).print(render_gpus(left.values()))
    if any(
        outcome not in ("ended", "killed", "gone before") for each in freed.values() for _, outcome in each.outcomes
    ):
        raise typer.Exit(1)


def confirm(others: Sequence["Holder"]) -> None:
    """Ask on the terminal. Raises EagleError where nobody can answer, or the answer is no."""
    from ray_eagle.preflight.gpus import describe

    for holder in others:
        sys.stderr.write(f"  {describe(holder)}\n")
    if not sys.stdin.isatty():
        raise EagleError(
            "--pid: these were not started by ray_eagle, or are in use. Say --yes to end them all the same."
        )
    sys.stderr.write(f"End {'it' if len(others) == 1 else 'them'}? [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise EagleError("--pid: not confirmed, nothing was ended.")
