"""The supervisor with real processes: whichever of them ends, however it ends, nothing of the server stays."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ray_eagle.errors import ServingError
from ray_eagle.serving import supervisor
from ray_eagle.serving.child import state_folder

SERVER = """
import signal, subprocess, sys, time
if "stubborn" in sys.argv: signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen([sys.executable, "-S", "-c", "import os, signal, time; signal.signal(15, signal.SIG_IGN); os.setsid(); time.sleep(99)"])
if "short" in sys.argv: sys.exit(7)
time.sleep(99)
"""
REPLICA = f"""
import os, subprocess, sys, time
folder, mark, *words = sys.argv[1:]
child = subprocess.Popen(
    [sys.executable, "-E", "-s", "-S", {supervisor.__file__!r}, f"{{folder}}/{{mark}}.json", f"{{folder}}/{{mark}}.log",
     sys.executable, "-S", "-c", {SERVER!r}, *words],
    stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    env={{**os.environ, "RAY_EAGLE_OWNED": mark, "SPT_NOENV": "1"}})
print(child.pid, child.stdout.readline().decode().split()[1], flush=True)
print(child.stdout.readline().decode().strip(), flush=True)
time.sleep(99)
"""


class Tree:
    """replica -> supervisor -> server -> a grandchild that ignores TERM in a session of its own."""

    def __init__(self, folder: Path, mark: str, *words: str) -> None:
        self.mark = mark
        command = [sys.executable, "-S", "-c", REPLICA, str(folder), mark, *words]
        self.replica = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.replica.stdout is not None
        self.supervisor, self.server = map(int, self.replica.stdout.readline().split())
        deadline = time.monotonic() + 5
        while len(self.all) < 4 and "short" not in words and time.monotonic() < deadline:
            time.sleep(0.02)

    @property
    def all(self) -> set[int]:
        return supervisor.marked(self.mark)

    @property
    def guard(self) -> int:
        [guard] = [p for p in self.all if supervisor.session_of(p) == p and b"supervisor" in _command(p)]
        return guard

    def gone_within(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while self.all and time.monotonic() < deadline:
            time.sleep(0.02)
        return not self.all


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


@pytest.fixture
def trees(tmp_path: Path) -> Iterator[Any]:
    made: list[Tree] = []

    def plant(*words: str) -> Tree:
        made.append(Tree(tmp_path, f"{tmp_path.name}-{len(made)}", *words))
        return made[-1]

    yield plant
    for tree in made:
        tree.replica.kill()
        tree.replica.wait()
        assert supervisor.end_processes(lambda tree=tree: tree.all, None, 0) == set()  # type: ignore[misc]


@pytest.mark.parametrize("victim", ["replica", "supervisor", "server"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_whole_tree_ends_with_any_of_its_members(trees: Any, victim: str, number: int) -> None:
    tree = trees()
    assert len(tree.all) == 4
    os.kill(tree.replica.pid if victim == "replica" else getattr(tree, victim), number)
    assert tree.gone_within(3)


def test_a_server_that_ignores_the_request_to_leave_is_killed_after_a_while(trees: Any, tmp_path: Path) -> None:
    tree = trees("stubborn")
    began = time.monotonic()
    tree.replica.kill()
    tree.replica.wait()
    assert tree.gone_within(supervisor.GRACE_S + 3)
    assert time.monotonic() - began > supervisor.GRACE_S - 0.5
    assert not list(tmp_path.glob("*.json"))


def test_ctrl_c_is_the_replicas_business(trees: Any) -> None:
    tree = trees()
    os.kill(tree.supervisor, signal.SIGINT)
    time.sleep(0.4)
    assert len(tree.all) == 4


def test_the_exit_code_reaches_the_replica(trees: Any) -> None:
    tree = trees("short")
    assert tree.replica.stdout.readline().strip() == "exited 7"
    assert tree.gone_within(3)


def test_the_next_start_ends_what_outlived_even_the_guard(trees: Any, tmp_path: Path) -> None:
    lost, running = trees(), trees()
    for pid in (lost.guard, lost.supervisor, lost.replica.pid):
        os.kill(pid, signal.SIGKILL)
    lost.replica.wait()
    time.sleep(0.3)
    assert lost.all, "the grandchild outlives them all"
    (tmp_path / "unreadable.json").write_text("{")
    assert supervisor.end_stale(tmp_path) == [lost.mark]
    assert not lost.all and len(running.all) == 4
    assert {path.name for path in tmp_path.glob("*.json")} == {f"{running.mark}.json", "unreadable.json"}
    assert supervisor.end_stale(tmp_path) == []


def test_a_process_that_only_has_the_number_of_a_server_is_left_alone(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(99)"], start_new_session=True) as other:
        write_record(tmp_path, server=other.pid, server_started=1)
        assert supervisor.end_stale(tmp_path) == []
        assert other.poll() is None and not list(tmp_path.glob("*.json"))
        other.kill()


def test_a_record_of_another_container_is_left_alone(tmp_path: Path) -> None:
    write_record(tmp_path, processes="pid:[1]", server=1, server_started=1)
    assert supervisor.end_stale(tmp_path) == []
    assert list(tmp_path.glob("*.json"))


def test_without_its_leader_a_session_is_not_the_servers(tmp_path: Path) -> None:
    """Session numbers are given again: what has one now and no mark is somebody else's."""
    words = "import os, subprocess, sys; print(subprocess.Popen(['sleep', '99'], stdout=subprocess.DEVNULL).pid)"
    leader = subprocess.Popen([sys.executable, "-S", "-c", words], start_new_session=True, stdout=subprocess.PIPE)
    other = int(leader.communicate()[0])
    try:
        assert supervisor.session_of(other) == leader.pid and supervisor.start_ticks(leader.pid) is None
        write_record(tmp_path, server=leader.pid, server_started=1)
        assert supervisor.end_stale(tmp_path) == [] and not list(tmp_path.glob("*.json"))
        assert supervisor.session_of(other) == leader.pid
    finally:
        os.kill(other, signal.SIGKILL)


def test_a_record_of_an_earlier_boot_ends_nothing_and_is_forgotten(trees: Any, tmp_path: Path) -> None:
    tree = trees()
    started = supervisor.start_ticks(tree.server)
    write_record(tmp_path, boot="another", mark=tree.mark, server=tree.server, server_started=started)
    assert supervisor.end_stale(tmp_path) == []
    assert len(tree.all) == 4 and {path.stem for path in tmp_path.glob("*.json")} == {tree.mark}


def write_record(folder: Path, **fields: Any) -> None:
    """Of a server whose replica is gone."""
    here = {"boot": supervisor.boot_id(), "processes": supervisor.namespace(), "mark": "m"}
    record = {**here, "replica": 2**22 + 1, "replica_started": 1, **fields}
    (folder / "m.json").write_text(json.dumps(record))


def test_scratch_files_go_with_a_replica_that_was_killed(
    trees: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    scratch, other = tmp_path / f"{supervisor.SCRATCH_PREFIX}a", tmp_path / "mine"
    for folder in (scratch, other):
        (folder / "random").mkdir(parents=True)
    monkeypatch.setenv(supervisor.SCRATCH, str(scratch))
    tree = trees()
    tree.replica.kill()
    tree.replica.wait()
    assert tree.gone_within(supervisor.GRACE_S + 3)
    assert not scratch.exists()

    scratch.mkdir()
    link = tmp_path / f"{supervisor.SCRATCH_PREFIX}link"
    link.symlink_to(other)
    for name, stays in ((f"{scratch}/../mine", True), (other, True), (link, True), (scratch, False)):
        write_record(tmp_path, server=2**22 + 2, server_started=1, scratch=str(name))
        assert supervisor.end_stale(tmp_path) == []
        assert Path(name).exists() == stays
    assert (other / "random").exists()


def test_exit_codes_of_other_children_stay_where_they_are_waited_for() -> None:
    child = subprocess.Popen([sys.executable, "-S", "-c", "raise SystemExit(5)"])
    time.sleep(0.3)
    rounds = iter([{2**22 + 1}, set()])
    assert supervisor.end_processes(lambda: next(rounds), None, 0) == set()
    assert child.wait() == 5


def test_owned_processes_are_found_by_their_mark(trees: Any) -> None:
    tree = trees()
    assert {pid for pid, mark in supervisor.owned().items() if mark == tree.mark} == tree.all
    assert os.getpid() not in supervisor.owned()


def test_records_are_kept_where_only_this_user_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = state_folder()
    assert folder == state_folder() and folder.parent.parent == tmp_path
    for each in (folder, folder.parent):
        each.chmod(0o770)
        with pytest.raises(ServingError, match=r"written by others \(mode 770\).*Remove it, or set TMPDIR"):
            state_folder()
        each.chmod(0o700)
    folder.parent.rename(tmp_path / "elsewhere")
    (tmp_path / f"ray_eagle-{os.getuid()}").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ServingError, match="is not a folder"):
        state_folder()
    monkeypatch.setattr(os, "getuid", lambda: 4242)
    (tmp_path / "ray_eagle-4242").mkdir(mode=0o700)
    with pytest.raises(ServingError, match="belongs to user"):
        state_folder()
