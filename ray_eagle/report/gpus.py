"""Who is on the GPUs, as a table and as JSON; and what freeing them did."""

from collections.abc import Iterable
from typing import Any

from rich.table import Table

from ray_eagle.preflight.estimate import human_bytes
from ray_eagle.preflight.freeing import Freed
from ray_eagle.preflight.gpus import Holder, NodeGpus, human_age

COMMAND_SHOWN = 100


def render_gpus(nodes: Iterable[NodeGpus]) -> Table:
    """A row for each process, below its GPU."""
    table = Table("GPU", "used", "pid", "user", "age", "memory", "whose", "command")
    for node in nodes:
        for gpu in node.gpus:
            reading = gpu.reading
            first = f"{node.host} GPU {reading.index}, {reading.name}"
            used = f"{human_bytes(reading.used)} of {human_bytes(reading.total)}"
            rows = [_row(holder) for holder in gpu.holders]
            if gpu.nobodys:
                hosts = ", ".join(map(str, gpu.outside)) or "?"
                rows.append((hosts, "", "", human_bytes(gpu.nobodys), "nobody visible from here", "look on the host"))
            for row in rows or [("",) * 6]:
                table.add_row(first, used, *row)
                first = used = ""
        for holder in node.left_behind:
            table.add_row(f"{node.host}, on no GPU", "", *_row(holder))
        if not node.gpus:
            table.add_row(f"{node.host}: no GPU")
    return table


def freed_words(freed: Freed) -> str:
    """What became of each process and of each GPU's memory, a line each."""
    host = freed.left.host
    lines = [f"{host}: pid {p.pid} {outcome}: {p.command[:COMMAND_SHOWN]}" for p, outcome in freed.outcomes]
    for gpu, before in zip(freed.left.gpus, freed.before, strict=True):
        used = gpu.reading.used
        lines.append(f"{host}: GPU {gpu.reading.index}: {human_bytes(before)} -> {human_bytes(used)} used")
    return "\n".join([*lines, f"{host}: settled after {freed.seconds:.1f} s"])


def freed_json(freed: Freed) -> dict[str, Any]:
    outcomes = [{"pid": p.pid, "command": p.command, "outcome": outcome} for p, outcome in freed.outcomes]
    used = [
        {"index": gpu.reading.index, "before": before, "after": gpu.reading.used}
        for gpu, before in zip(freed.left.gpus, freed.before, strict=True)
    ]
    return {"host": freed.left.host, "processes": outcomes, "gpus": used, "seconds": round(freed.seconds, 2)}


def node_json(node: NodeGpus) -> dict[str, Any]:
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
    left = [_holder(holder) for holder in node.left_behind]
    driver = node.driver
    return {
        "host": node.host,
        "driver": driver.version,
        "cuda": list(driver.cuda),
        "gpus": gpus,
        "left_behind": left,
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


def _row(holder: Holder) -> tuple[str, str, str, str, str, str]:
    process = holder.process
    return (
        str(process.pid),
        process.user,
        human_age(process.age_s),
        "not said" if holder.bytes is None else human_bytes(holder.bytes),
        holder.standing.reason,
        process.command[:COMMAND_SHOWN],
    )
