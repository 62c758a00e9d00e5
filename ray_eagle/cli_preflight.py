"""`ray-eagle preflight --gpus` and `--free-gpus`: who is on the GPUs, and ending what was left there."""

import json
import sys
from collections.abc import Sequence
from typing import Any, TextIO

import typer
from rich.console import Console
from rich.table import Table

from ray_eagle import cluster
from ray_eagle.config import Config
from ray_eagle.errors import EagleError
from ray_eagle.preflight.estimate import human_bytes
from ray_eagle.preflight.freeing import Freed, free_nodes, look_at_nodes, named, stale
from ray_eagle.preflight.gpus import Holder, NodeGpus, describe, human_age


def gpus_command(
    config: Config, *, end_stale: bool, pids: Sequence[str], sure: bool, json_output: bool, out: TextIO
) -> None:
    """List who is on the GPUs of every node; with `end_stale` end ours that were left behind, and `pids` once confirmed.

    Exits with 1 when something that was to be ended is still there.
    """
    cluster.connect(config.ray)
    nodes = look_at_nodes()
    if not end_stale:
        _show(nodes, json_output, out)
        return
    chosen = named(nodes, pids)
    others = [holder for holders in chosen.values() for holder in holders if not holder.standing.stale]
    if others and not sure:
        _confirm(others)
    targets = {name: [h.process for h in [*stale(node), *chosen.get(name, [])]] for name, node in nodes.items()}
    freed = free_nodes({name: list(dict.fromkeys(each)) for name, each in targets.items() if each})
    if json_output:
        print(json.dumps([_freed(each) for each in freed.values()]), file=out)
    else:
        for each in freed.values():
            name = each.left.host
            for process, outcome in each.outcomes:
                print(f"{name}: pid {process.pid} {outcome}: {process.command[:100]}", file=out)
            for gpu, before in zip(each.left.gpus, each.before, strict=True):
                now = f"{human_bytes(before)} -> {human_bytes(gpu.reading.used)} used"
                print(f"{name}: GPU {gpu.reading.index}: {now}", file=out)
            print(f"{name}: settled after {each.seconds:.1f} s", file=out)
        if not freed:
            print("nothing of ours was left behind", file=out)
        _show({name: freed[name].left if name in freed else node for name, node in nodes.items()}, False, out)
    if any(
        outcome not in ("ended", "killed", "gone before") for each in freed.values() for _, outcome in each.outcomes
    ):
        raise typer.Exit(1)


def _confirm(others: Sequence[Holder]) -> None:
    """Ask on the terminal. Raises EagleError where nobody can answer, or the answer is no."""
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


def _show(nodes: dict[str, NodeGpus], json_output: bool, out: TextIO) -> None:
    if json_output:
        print(json.dumps([_node(node) for node in nodes.values()]), file=out)
        return
    table = Table("GPU", "used", "pid", "user", "age", "memory", "whose", "command")
    for node in nodes.values():
        name = node.host
        for gpu in node.gpus:
            reading = gpu.reading
            first = f"{name} GPU {reading.index}, {reading.name}"
            used = f"{human_bytes(reading.used)} of {human_bytes(reading.total)}"
            rows = [_row(holder) for holder in gpu.holders]
            if gpu.nobodys:
                hosts = ", ".join(map(str, gpu.outside)) or "?"
                rows.append((hosts, "", "", human_bytes(gpu.nobodys), "nobody visible from here", "look on the host"))
            for row in rows or [("", "", "", "", "", "")]:
                table.add_row(first, used, *row)
                first = used = ""
        for holder in node.left_behind:
            table.add_row(f"{name}, on no GPU", "", *_row(holder))
        if not node.gpus:
            table.add_row(f"{name}: no GPU", "", "", "", "", "", "", "")
    Console(file=out, width=None if out.isatty() else 160).print(table)


def _row(holder: Holder) -> tuple[str, str, str, str, str, str]:
    process = holder.process
    memory = "not said" if holder.bytes is None else human_bytes(holder.bytes)
    return (
        str(process.pid),
        process.user,
        human_age(process.age_s),
        memory,
        holder.standing.reason,
        process.command[:100],
    )


def _freed(freed: Freed) -> dict[str, Any]:
    outcomes = [{"pid": p.pid, "command": p.command, "outcome": outcome} for p, outcome in freed.outcomes]
    used = [{"index": g.reading.index, "before": b} for g, b in zip(freed.left.gpus, freed.before, strict=True)]
    return {"processes": outcomes, "gpus": used, "seconds": round(freed.seconds, 2), "left": _node(freed.left)}


def _node(node: NodeGpus) -> dict[str, Any]:
    gpus = [
        {
            "index": gpu.reading.index,
            "name": gpu.reading.name,
            "capability": list(gpu.reading.capability),
            "used": gpu.reading.used,
            "total": gpu.reading.total,
            "processes": [_holder(holder) for holder in gpu.holders],
            "nobodys_bytes": gpu.nobodys,
            "pids_on_the_host": list(gpu.outside),
        }
        for gpu in node.gpus
    ]
    return {
        "host": node.host,
        "driver": node.driver.version,
        "cuda": list(node.driver.cuda),
        "gpus": gpus,
        "left_behind": [_holder(holder) for holder in node.left_behind],
    }


def _holder(holder: Holder) -> dict[str, Any]:
    process = holder.process
    return {
        "pid": process.pid,
        "user": process.user,
        "age_s": round(process.age_s, 1),
        "bytes": holder.bytes,
        "command": process.command,
        "ours": holder.standing.ours,
        "stale": holder.standing.stale,
        "reason": holder.standing.reason,
        "job": process.job,
    }
