"""Real processes, marked or not, orphaned or not; fake /proc trees for what a machine of tests cannot have."""

import json
import os
import pwd
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from ray_eagle.preflight.processes import (
    OWNED_VARIABLE,
    Process,
    RayFacts,
    ancestors,
    end,
    read_process,
    recorded_replicas,
    scan,
    standing,
)
from ray_eagle.serving import supervisor
from tests.processes import STUBBORN, WAIT, Start, fake


def test_a_process_is_read_as_it_is(start: Start) -> None:
    before = time.time()
    child = start(mark="run 7", RAY_JOB_ID="0a000000", RAY_RAYLET_PID="4242")
    assert (child.owned, child.job, child.raylet, child.parent) == ("run 7", "0a000000", 4242, os.getpid())
    assert child.user == pwd.getpwuid(os.getuid()).pw_name
    assert child.command == f"{sys.executable} -c {WAIT}"
    assert (child.devices, child.cuda, child.readable) == ((), False, True)
    assert -1 <= child.age_s <= time.time() - before + 1
    assert scan()[child.pid].started == child.started
    assert next(ancestors(child, scan())).pid == os.getpid()


def test_the_supervisor_marks_what_preflight_looks_for() -> None:
    assert supervisor.MARK == OWNED_VARIABLE


def test_a_zombie_and_a_pid_that_is_not_there_are_nothing(start: Start) -> None:
    child = start()
    os.kill(child.pid, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while read_process(child.pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert (Path("/proc") / str(child.pid)).exists(), "nobody has waited for it yet"
    assert read_process(child.pid) is None
    assert read_process(2**22 + 1) is None


def test_names_with_brackets_and_open_devices_are_read(tmp_path: Path) -> None:
    fake(tmp_path, 7, name="a) S (b", started=500)
    for number, target in enumerate(("/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia3", "/dev/nvidia0", "/dev/null")):
        (tmp_path / "7" / "fd" / str(number)).symlink_to(target)
    process = read_process(7, tmp_path)
    assert process
    assert (process.name, process.started, process.devices, process.cuda) == ("a) S (b", 500, (0, 3), True)
    assert process.age_s == pytest.approx(1000 - 500 / os.sysconf("SC_CLK_TCK"))


def tree(root: Path, *, mark: str = "x", **environment: str) -> dict[int, Process]:
    """init 1 - raylet 10 - worker 11; init 1 - shell 20; init 1 - process 50 of the given environment."""
    fake(root, 1, parent=0, name="systemd", started=1)
    fake(root, 10, name="raylet", started=50)
    fake(root, 11, parent=10, name="ray::Server", started=60)
    fake(root, 20, name="bash", started=20)
    fake(root, 50, **environment, **({OWNED_VARIABLE: mark} if mark else {}))
    return scan(root)


HERE = RayFacts(raylet=10, live_jobs=frozenset({"01000000"}))
OF_JOB_1 = {"RAY_RAYLET_PID": "10", "RAY_JOB_ID": "01000000"}
OF_JOB_2 = {"RAY_RAYLET_PID": "10", "RAY_JOB_ID": "02000000"}


@pytest.mark.parametrize(
    ("environment", "parent", "facts", "stale", "words"),
    [
        ({}, 1, RayFacts(), True, "its launcher is gone"),
        ({}, 20, RayFacts(), False, "its launcher pid 20 (bash) lives"),
        ({}, 11, RayFacts(), False, "of a Ray worker that lives"),
        (OF_JOB_1, 1, HERE, False, "its job 01000000 lives"),
        (OF_JOB_2, 1, HERE, True, "its job ended"),
        (OF_JOB_2, 11, HERE, False, "of a Ray worker that lives"),  # a Serve app outlives the job that deployed it
        (OF_JOB_1, 1, RayFacts(), False, "another Ray cluster that runs here (raylet pid 10)"),
        ({"RAY_RAYLET_PID": "999", "RAY_JOB_ID": "01000000"}, 1, HERE, True, "its Ray cluster is gone"),
        (
            {"RAY_RAYLET_PID": "20", "RAY_JOB_ID": "01000000"},
            1,
            HERE,
            True,
            "its Ray cluster is gone",
        ),  # pid 20 is a shell
    ],
)
def test_only_what_nothing_accounts_for_is_stale(
    tmp_path: Path, environment: dict[str, str], parent: int, facts: RayFacts, stale: bool, words: str
) -> None:
    processes = tree(tmp_path, **environment)
    process = replace(processes[50], parent=parent)
    found = standing(process, processes, facts)
    assert (found.ours, found.stale) == (True, stale)
    assert words in found.reason


@pytest.mark.parametrize(
    ("replica", "stale", "words"),
    [
        ([11, 60], False, "its replica pid 11 lives"),
        ([11, 59], True, "its replica is gone"),
        ([99, 1], True, "is gone"),
    ],
)
def test_the_supervisors_record_decides_whatever_adopted_the_orphan(
    tmp_path: Path, replica: list[int], stale: bool, words: str
) -> None:
    processes = tree(tmp_path / "proc", mark="sglang-1")
    folder = records(tmp_path)
    record = {**HERE_NOW, "mark": "sglang-1", "replica": replica[0], "replica_started": replica[1]}
    (folder / "sglang-1.json").write_text(json.dumps(record))
    (folder / "broken.json").write_text('{"mark": ')
    facts = RayFacts(replicas=recorded_replicas(tmp_path))
    for parent in (1, 20):  # 20: some program that adopts orphans
        found = standing(replace(processes[50], parent=parent), processes, facts)
        assert (found.stale, words in found.reason) == (stale, True)


HERE_NOW = {"boot": supervisor.boot_id(), "processes": supervisor.namespace()}


def records(root: Path) -> Path:
    folder = root / f"ray_eagle-{os.getuid()}" / "servers"
    for each in (folder.parent, folder):
        each.mkdir(mode=0o700)
    return folder


def test_records_that_another_may_have_written_or_of_other_processes_say_nothing(tmp_path: Path) -> None:
    folder = records(tmp_path)
    record = {**HERE_NOW, "mark": "m", "replica": 7, "replica_started": 8}
    path = folder / "m.json"
    path.write_text(json.dumps(record))
    assert recorded_replicas(tmp_path) == {"m": (7, 8)}
    for differing in ({"boot": "another"}, {"processes": "pid:[1]"}):
        path.write_text(json.dumps({**record, **differing}))
        assert recorded_replicas(tmp_path) == {}
    path.write_text(json.dumps(record))
    folder.chmod(0o777)
    assert recorded_replicas(tmp_path) == {}
    folder.chmod(0o700)
    folder.parent.rename(tmp_path / "ray_eagle-4242")
    assert recorded_replicas(tmp_path) == {}


def test_a_raylet_that_is_younger_than_the_process_is_another(tmp_path: Path) -> None:
    processes = tree(tmp_path, **OF_JOB_1)
    processes[10] = replace(processes[10], started=200)
    assert standing(processes[50], processes, HERE).stale


def test_a_process_without_the_mark_is_never_stale(tmp_path: Path) -> None:
    processes = tree(tmp_path, mark="", **OF_JOB_2)
    found = standing(processes[50], processes, HERE)
    assert (found.ours, found.stale) == (False, False)
    assert "of a Ray cluster that runs" in found.reason
    assert standing(processes[20], processes, HERE).reason == "not ours"


def test_children_of_a_marked_process_are_ours_and_follow_its_fate(start: Start) -> None:
    program = "import subprocess, sys; c = subprocess.Popen(['sleep', '600']); print(c.pid, flush=True); c.wait()"
    parent = start(program)
    children = [p for p in scan().values() if p.parent == parent.pid]
    assert [p.owned for p in children] == ["tests"]
    assert not standing(children[0], scan(), RayFacts()).stale, "the tests live, and started it"
    os.kill(parent.pid, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while not standing(scan()[children[0].pid], scan(), RayFacts()).stale and time.monotonic() < deadline:
        time.sleep(0.02)
    assert standing(scan()[children[0].pid], scan(), RayFacts()).stale
    assert end([children[0]]) == {children[0].pid: "ended"}


def test_an_orphan_is_ended_and_a_stubborn_one_killed(start: Start) -> None:
    meek, stubborn, bystander = start(orphan=True), start(STUBBORN, orphan=True), start(mark="")
    time.sleep(0.5)  # until the stubborn one ignores TERM
    assert all(standing(p, scan(), RayFacts()).stale for p in (meek, stubborn))
    began = time.monotonic()
    assert end([meek, stubborn], term_s=1.0) == {meek.pid: "ended", stubborn.pid: "killed"}
    assert 1.0 <= time.monotonic() - began < 5
    assert read_process(bystander.pid) and not read_process(meek.pid) and not read_process(stubborn.pid)
    assert end([meek]) == {meek.pid: "gone before"}


def test_a_reused_pid_is_never_killed(start: Start) -> None:
    process = start(orphan=True)
    before = replace(process, started=process.started - 1)  # what had this pid when preflight looked
    assert end([before], term_s=0.2) == {process.pid: "gone before"}
    assert read_process(process.pid)


def test_this_process_and_its_parents_are_refused() -> None:
    me = scan()[os.getpid()]
    above = next(ancestors(me, scan()))
    assert end([me, above], term_s=0.1) == {me.pid: "refused", above.pid: "refused"}


def test_without_descriptors_of_processes_the_start_time_guards(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int) -> int:
        raise OSError(38, "not implemented in this sandbox")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    process = start(orphan=True)
    assert end([replace(process, started=process.started - 1)]) == {process.pid: "gone before"}
    assert end([process]) == {process.pid: "ended"}
