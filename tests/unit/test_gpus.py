"""GPUs as a driver would report them (recorded), processes from fake /proc trees or real ones; freeing real processes."""

import io
import json
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import ray
from rich.console import Console
from typer.testing import CliRunner

from ray_eagle import cli
from ray_eagle.cli_preflight import confirm
from ray_eagle.cluster import live_jobs
from ray_eagle.errors import ConfigError, EagleError, InputError
from ray_eagle.preflight.freeing import free, free_nodes, look_at_nodes, named, stale
from ray_eagle.preflight.gpus import DriverReading, GpuReading, NodeGpus, account, check_gpus, human_age, inspect, nvml
from ray_eagle.preflight.processes import OWNED_VARIABLE, Process, RayFacts, read_process, scan
from ray_eagle.report.gpus import freed_words, render_gpus
from tests.processes import Start, fake

GB = 10**9


def h200(index: int = 0, used: int = 0, *processes: tuple[int, int | None]) -> GpuReading:
    return GpuReading(index, index, "NVIDIA H200", 150 * GB, used, (9, 0), processes)


def driver(*gpus: GpuReading) -> DriverReading:
    return DriverReading("580.159.03", (13, 0), gpus)


def on_gpu(root: Path, pid: int, *minors: int, uvm: bool = True) -> None:
    targets = [f"/dev/nvidia{minor}" for minor in minors] + ["/dev/nvidiactl"] + ["/dev/nvidia-uvm"] * uvm
    for number, target in enumerate(targets):
        (root / str(pid) / "fd" / str(number)).symlink_to(target)


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """init; 41, a left-over server of ours on GPU 0; 42, somebody's notebook on GPU 1; 43, nvidia-smi; 44, a launcher."""
    root = tmp_path / "proc"
    fake(root, 1, parent=0, name="systemd", started=1)
    fake(root, 41, **{OWNED_VARIABLE: "x", "RAY_RAYLET_PID": "9", "RAY_JOB_ID": "01000000"})
    fake(root, 42, name="jupyter")
    fake(root, 43, name="nvidia-smi")
    fake(root, 44, **{OWNED_VARIABLE: "x"})
    on_gpu(root, 41, 0)
    on_gpu(root, 42, 0, 1)
    on_gpu(root, 43, 0, 1, uvm=False)
    return root


def holders(node: NodeGpus) -> list[list[tuple[int, int | None]]]:
    return [[(h.process.pid, h.bytes) for h in gpu.holders] for gpu in node.gpus]


def test_the_drivers_bytes_meet_the_processes_of_proc(proc: Path) -> None:
    reading = driver(h200(0, 81 * GB, (41, 81 * GB)), h200(1, 2 * GB, (42, 2 * GB)))
    node = inspect(lambda: reading, proc)
    assert holders(node) == [[(41, 81 * GB)], [(42, 2 * GB)]], "42 has GPU 0 open too, but the driver says where it is"
    assert [gpu.nobodys for gpu in node.gpus] == [0, 0]
    assert [h.process.pid for h in node.left_behind] == [44]
    assert [h.process.pid for h in stale(node)] == [41, 44]
    assert node.gpus[0].holders[0].standing.reason == "ours, left behind: its Ray cluster is gone"


def test_a_driver_that_names_nobody_leaves_the_open_files(proc: Path) -> None:
    node = inspect(lambda: driver(h200(0, 81 * GB), h200(1, 2 * GB)), proc)
    assert holders(node) == [[(41, None), (42, None)], [(42, None)]], "nvidia-smi holds no context"
    assert [gpu.nobodys for gpu in node.gpus] == [0, 0], "somebody is there, so nobody can say it is nobody's"


def test_pids_of_the_host_are_not_taken_for_ours(proc: Path) -> None:
    fake(proc, 77, name="sshd")  # has no GPU file open: the driver's 77 is another container's
    node = inspect(lambda: driver(h200(0, 90 * GB, (77, 85 * GB), (123456, 5 * GB))), proc.parent / "proc")
    (gpu,) = node.gpus
    assert 77 not in [h.process.pid for h in gpu.holders]
    assert gpu.outside == (77, 123456)


def test_memory_of_nobody_is_reported_with_what_to_run_on_the_host(tmp_path: Path) -> None:
    fake(tmp_path, 1, parent=0, name="systemd")
    node = inspect(lambda: driver(h200(0, 81 * GB, (123456, 81 * GB)), h200(1, 500 * 10**6)), tmp_path)
    assert [gpu.nobodys for gpu in node.gpus] == [81 * GB, 0], "the driver itself keeps half a GB"
    held, free_one = check_gpus({"": node}, 2, ["extract"])
    assert (held.level, free_one.level) == ("warning", "ok")
    assert "81 GB of no process that can be seen from here (on the host: pid 123456)" in held.message
    assert "on the host run `nvidia-smi --query-compute-apps" in held.fix


def test_findings_say_who_and_what_to_do(proc: Path) -> None:
    reading = driver(h200(0, 83 * GB, (41, 81 * GB), (42, 2 * GB)), h200(1, 0))
    held, empty, left = check_gpus({"node-a": inspect(lambda: reading, proc)}, 2, ["extract"])
    assert (held.level, empty.level, left.level) == ("warning", "ok", "warning")
    assert held.message.startswith("node-a GPU 0, NVIDIA H200 (sm_90): 83 GB of 150 GB used by pid 41 (")
    assert "81 GB) python -m work: ours, left behind" in held.message
    assert "2 GB) jupyter -m work: not ours" in held.message
    assert "`ray-eagle preflight --free-gpus` ends what was left behind." in held.fix
    assert "--pid 42" in held.fix
    assert empty.message.endswith("no process on it.")
    assert "on no GPU, pid 44" in left.message
    (error,) = check_gpus({}, 1, ["extract"])
    assert "extract ask for 1 at the same time, found 0" in error.message
    (fine,) = check_gpus({}, 0, [])
    assert fine.level == "ok"


def test_open_files_that_cannot_be_listed_are_said(proc: Path) -> None:
    processes = {pid: replace(p, readable=pid != 42) for pid, p in scan(proc).items()}
    node = account(driver(h200(0, 0)), processes, RayFacts())
    assert node.unreadable == 1
    assert any("open files of 1 processes of other users" in f.message for f in check_gpus({"": node}, 1, ["x"]))


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0 s"), (59, "59 s"), (61, "1 min"), (7200, "2 h"), (200_000, "2 d")]
)
def test_human_age(seconds: float, text: str) -> None:
    assert human_age(seconds) == text


def test_named_processes_must_be_on_one_gpu_of_one_node(proc: Path) -> None:
    reading = driver(h200(0, 83 * GB, (41, 81 * GB), (42, 2 * GB)))
    one = replace(inspect(lambda: reading, proc), host="a")
    nodes = {"1": one, "2": replace(one, host="b")}
    assert [h.process.pid for h in named(nodes, ["a:42"])["1"]] == [42]
    with pytest.raises(InputError, match=r"found it on: a, b\. Say HOST:PID"):
        named(nodes, ["42"])
    with pytest.raises(InputError, match="found it on: none"):
        named(nodes, ["a:44"])
    with pytest.raises(ConfigError, match="expected PID or HOST:PID"):
        named(nodes, ["nvidia-smi"])


class Recorded:
    """A driver whose memory comes free `late` seconds after the process that holds it has gone."""

    def __init__(self, process: Process, late: float, size: int | None) -> None:
        self.process, self.late, self.size = process, late, size
        self.gone_at: float | None = None

    def __call__(self) -> DriverReading:
        alive = read_process(self.process.pid) is not None
        if not alive and self.gone_at is None:
            self.gone_at = time.monotonic()
        if alive:
            return driver(h200(0, 81 * GB, (self.process.pid, self.size)))
        held = self.gone_at is not None and time.monotonic() - self.gone_at < self.late
        return driver(h200(0, 81 * GB if held else 0))


def with_gpu(process: Process, root: Path) -> Path:
    """A /proc in which this real process has GPU 0 open."""
    fake(root, 1, parent=0, name="systemd", started=1)
    (root / str(process.pid) / "fd").mkdir(parents=True)
    for name in ("stat", "cmdline", "environ"):
        (root / str(process.pid) / name).symlink_to(f"/proc/{process.pid}/{name}")
    on_gpu(root, process.pid, 0)
    return root


@pytest.mark.parametrize("size", [80 * GB, None])
def test_freeing_waits_until_the_memory_is_really_free(start: Start, tmp_path: Path, size: int | None) -> None:
    process = start(orphan=True)
    read = Recorded(process, 1.0, size)
    freed = free([process], read=read, proc=with_gpu(process, tmp_path))
    assert freed.outcomes == ((process, "ended"),)
    assert freed.before == (81 * GB,)
    assert freed.left.gpus[0].reading.used == 0
    assert 1.0 < freed.seconds < 5
    assert f"pid {process.pid} ended" in freed_words(freed) and "81 GB -> 0 B used" in freed_words(freed)


def test_what_stays_is_said(start: Start, tmp_path: Path) -> None:
    process = start(orphan=True)
    read = Recorded(process, 60.0, 80 * GB)
    freed = free([process], read=read, proc=with_gpu(process, tmp_path), memory_s=1.0)
    assert freed.left.gpus[0].reading.used == 81 * GB
    assert freed.left.gpus[0].nobodys == 81 * GB
    assert 1.0 <= freed.seconds < 5


def test_every_node_of_the_cluster_is_looked_at_and_freed(cluster: None, start: Start) -> None:
    left_over = start(orphan=True)
    ((node_id, node),) = look_at_nodes().items()
    assert left_over.pid in [h.process.pid for h in stale(node)]
    mine = next(h.process for h in stale(node) if h.process.pid == left_over.pid)
    assert mine.started == left_over.started
    freed = free_nodes({node_id: [mine]})
    assert [(p.pid, outcome) for p, outcome in freed[node_id].outcomes] == [(left_over.pid, "ended")]
    assert free_nodes({}) == {}
    assert read_process(left_over.pid) is None


def test_jobs_of_the_cluster_are_known(cluster: None) -> None:
    assert ray.get_runtime_context().get_job_id() in live_jobs()


def test_the_command_lists_and_refuses_what_is_wrong(
    cluster: None,
    start: Start,
    capfd: pytest.CaptureFixture[str],
) -> None:
    left_over = start(orphan=True)
    runner = CliRunner()
    assert runner.invoke(cli.app, ["preflight", "--gpus"]).exit_code == 0
    assert str(left_over.pid) in capfd.readouterr().out
    assert runner.invoke(cli.app, ["preflight", "--gpus", "--json"]).exit_code == 0
    (node,) = json.loads(capfd.readouterr().out)["nodes"]
    assert left_over.pid in [each["pid"] for each in node["left_behind"] if each["stale"] and each["ours"]]
    refused = runner.invoke(cli.app, ["preflight", "--pid", "1"])
    assert (refused.exit_code, "expected --free-gpus" in refused.stderr) == (2, True)
    unknown = runner.invoke(cli.app, ["preflight", "--free-gpus", "--pid", str(left_over.pid)])
    assert (unknown.exit_code, "Only processes that hold a GPU are ended" in unknown.stderr) == (1, True)
    assert read_process(left_over.pid), "nothing is ended when one of the names is wrong"


def test_what_is_not_ours_is_ended_only_when_confirmed(proc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = inspect(lambda: driver(h200(0, 2 * GB, (42, 2 * GB))), proc)
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    with pytest.raises(EagleError, match="Say --yes"):  # nobody is at a terminal
        confirm(node.gpus[0].holders)


def test_the_table_reads_well(proc: Path) -> None:
    reading = driver(h200(0, 83 * GB, (41, 81 * GB)), h200(1, 3 * GB, (42, GB)))
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(render_gpus([inspect(lambda: reading, proc)]))
    text = console.export_text()
    for words in (
        "GPU 0, NVIDIA H200",
        "83 GB of 150 GB",
        "81 GB",
        "its Ray cluster is gone",
        "on no GPU",
        "nobody visible",
    ):
        assert words in text


def test_nvml_without_a_driver_finds_no_gpu() -> None:
    if Path("/dev/nvidiactl").exists():
        pytest.skip("this machine has a driver: tests/gpu looks at it")
    assert nvml() == DriverReading()
