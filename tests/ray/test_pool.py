"""The actor pool on real actors that die, refuse or hang as told: each unit once, and only the guilty set aside."""

import os
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import ray

from ray_eagle.errors import TargetError, WorkerError, WorkerLost
from ray_eagle.pool import ActorPool, Member, this_node

pytestmark = pytest.mark.usefixtures("cluster")


class Fragile:
    """Writes down what it begins in a folder, and misbehaves as `rules` (word -> units or samples) say."""

    def __init__(self, folder: Path, rules: dict[str, Any]) -> None:
        self.folder, self.rules = folder, rules
        self.note("start")
        if rules.get("raises at start", 0) > self.count("start") - 1:
            raise TargetError("weights are missing")
        if rules.get("dies at start", 0) > self.count("start") - 1:
            os.kill(os.getpid(), signal.SIGKILL)

    def note(self, word: str) -> None:
        """An empty file, so that a SIGKILL right after leaves it."""
        (self.folder / f"{word}.{os.getpid()}.{time.monotonic_ns()}").touch()

    def count(self, word: str) -> int:
        return sum(path.name.split(".")[0] == word for path in self.folder.iterdir())

    def ready(self) -> str:
        return this_node()

    def work(self, unit: str, without: frozenset[str] = frozenset()) -> str:
        self.note(f"work {unit}")
        if unit in self.rules.get("refuses", ()):
            raise TargetError(f"unit {unit} is bad")
        if unit in self.rules.get("slow", ()):
            time.sleep(1.0)
        if unit in self.rules.get("loses", ()) and self.count(f"work {unit}") <= 2:
            raise WorkerLost("stage 2 died")
        time.sleep(0.05)  # the reply to the call before must be out
        poison = [s for s in samples_of(unit) if s in self.rules.get("poison", ()) and s not in without]
        deaths = self.rules.get("dies", {}).get(unit, 0)
        if poison or self.count(f"work {unit}") <= deaths:
            os.kill(os.getpid(), signal.SIGKILL)
        return "".join(s for s in samples_of(unit) if s not in without)

    def trial(self, unit: str, sample: int) -> None:
        name = samples_of(unit)[sample]
        self.note(f"trial {name}")
        time.sleep(0.05)
        if name in self.rules.get("poison", ()) or self.count(f"trial {name}") <= self.rules.get("weak", {}).get(
            name, 0
        ):
            os.kill(os.getpid(), signal.SIGKILL)


def samples_of(unit: str) -> list[str]:
    """Unit "q" holds q0, q1, q2, q3."""
    return [f"{unit}{i}" for i in range(4)]


class Told:
    """A pool of Fragile actors, and what they wrote down."""

    def __init__(self, folder: Path, *, size: int = 2, apart: bool = True, threads: int = 1, **rules: Any) -> None:
        self.folder = folder
        self.closed: list[str] = []
        words = {word.replace("_", " "): value for word, value in rules.items()}
        actor = ray.remote(Fragile)

        def make(name: str) -> Member:
            handle = actor.options(
                name=name, num_cpus=0.5, max_restarts=0, max_task_retries=0, max_concurrency=threads
            ).remote(folder, words)
            return Member(handle, lambda: self.closed.append(name))

        self.pool = ActorPool(
            make,
            size,
            f"eagle-{folder.name}",
            concurrency=threads,
            samples=samples_of if apart else None,
        )

    def run(self, units: str) -> dict[str, str]:
        results: dict[str, str] = {}
        for unit, result in self.pool.run(list(units)):
            assert unit not in results, "every unit once"
            results[unit] = result
        assert len(self.closed) == len(set(self.closed)) == self.pool._made, "every member is closed, once"
        return results

    def noted(self) -> Counter[str]:
        return Counter(path.name.split(".")[0] for path in self.folder.iterdir())

    def pids(self, word: str) -> list[int]:
        """Of the actors that noted it, in the order of time."""
        notes = [p.name.split(".") for p in self.folder.iterdir() if p.name.split(".")[0] == word]
        return [int(pid) for _, pid, _ in sorted(notes, key=lambda note: int(note[2]))]


def whole(units: str, *killers: str) -> dict[str, str]:
    return {unit: "".join(s for s in samples_of(unit) if s not in killers) for unit in units}


def test_every_unit_once_on_all_actors(tmp_path: Path) -> None:
    told = Told(tmp_path, size=3)
    units = "abcdefghijklmnopqrst"
    assert told.run(units) == whole(units)
    noted = told.noted()
    assert noted.pop("start") <= 3 and noted == Counter(f"work {u}" for u in units)
    assert (told.pool.deaths, told.pool.retries, told.pool.quarantined) == (0, 0, {})


def test_few_units_reach_all_actors(tmp_path: Path) -> None:
    told = Told(tmp_path, size=3, slow="abc")
    told.run("abc")
    assert len({told.pids(f"work {unit}")[0] for unit in "abc"}) == 3


@pytest.mark.parametrize("size", [1, 2])
def test_a_poison_sample_is_set_aside_after_three_fresh_actors_and_all_else_comes_through(
    tmp_path: Path, size: int
) -> None:
    told = Told(tmp_path, size=size, poison=["c2"])
    assert told.run("abcdef") == whole("abcdef", "c2")
    assert list(told.pool.quarantined) == ["c2"] and "killed 3 fresh actors" in told.pool.quarantined["c2"]
    noted = told.noted()
    assert noted["work c"] == 4, "three deaths, then once without its killer"
    assert noted["trial c2"] == 4, (
        "once behind c0 and c1 on an actor that is not fresh any more, then on three fresh ones"
    )
    assert len(set(told.pids("trial c2"))) == 4 and set(told.pids("trial c2")[1:]).isdisjoint(told.pids("trial c1"))
    assert noted["trial c0"] == noted["trial c1"] == noted["trial c3"] == 1
    assert told.pool.deaths == 7 and told.pool.node_deaths == 0
    assert sum(n for word, n in noted.items() if word.startswith("trial")) == 7, "no other unit is on trial"


def test_two_poison_samples_of_one_unit_and_one_of_another(tmp_path: Path) -> None:
    told = Told(tmp_path, poison=["a0", "a3", "d1"])
    assert told.run("abcdef") == whole("abcdef", "a0", "a3", "d1")
    assert sorted(told.pool.quarantined) == ["a0", "a3", "d1"]


def test_a_sample_that_succeeds_before_its_third_death_stays(tmp_path: Path) -> None:
    told = Told(tmp_path, weak={"b0": 2}, dies={"b": 3})
    assert told.run("abc") == whole("abc")
    assert told.noted()["trial b0"] == 3 and told.pool.quarantined == {}


def test_a_unit_that_dies_only_as_a_whole_ends_the_run_after_its_trial(tmp_path: Path) -> None:
    told = Told(tmp_path, dies={"b": 99})
    with pytest.raises(
        WorkerError, match=r"unit b was running in 3 actors.*each of its samples survives alone.*tokens_per_batch"
    ):
        told.run("abcdef")
    noted = told.noted()
    assert noted["work b"] == 6 and all(noted[f"trial b{i}"] == 1 for i in range(4))
    assert told.pool.quarantined == {} and len(told.closed) == told.pool._made


def test_others_work_while_a_suspect_is_on_trial(tmp_path: Path) -> None:
    told = Told(tmp_path, poison=["a0"], slow="bcdefghijklmnop")
    assert told.run("abcdefghijklmnop") == whole("abcdefghijklmnop", "a0")
    notes = sorted((int(p.name.split(".")[2]), p.name.split(".")[0]) for p in tmp_path.iterdir())
    trials = [i for i, (_, word) in enumerate(notes) if word.startswith("trial")]
    between = [word for _, word in notes[trials[0] : trials[-1]] if word.startswith("work")]
    assert len(between) >= 2


@pytest.mark.parametrize(
    ("rules", "error", "words"),
    [
        ({"dies": {"c": 99}, "apart": False}, WorkerError, "unit c was running in 3 actors that died.*committed is kept"),
        ({"refuses": "c"}, TargetError, "unit c is bad"),
        ({"raises_at_start": 99}, WorkerError, "3 actors failed to start.*weights are missing"),
        ({"dies_at_start": 99}, WorkerError, "6 actors in a row were killed while starting"),
    ],
)  # fmt: skip
def test_the_pool_ends_with_one_clear_error(
    tmp_path: Path, rules: dict[str, Any], error: type[Exception], words: str
) -> None:
    told = Told(tmp_path, **rules)
    with pytest.raises(error, match=r"(?s)" + words):
        told.run("abcdef")
    assert len(told.closed) == told.pool._made
    if "dies" in rules:
        assert told.noted()["work c"] == 3


@pytest.mark.parametrize(("rules", "starts"), [({"raises_at_start": 2}, 3), ({"dies_at_start": 5}, 6)])
def test_fewer_failed_starts_are_borne_and_blamed_on_no_unit(
    tmp_path: Path, rules: dict[str, Any], starts: int
) -> None:
    told = Told(tmp_path, size=1, **rules)
    assert told.run("ab") == whole("ab")
    assert told.noted() == Counter({"start": starts, "work a": 1, "work b": 1})


def test_only_the_running_unit_is_blamed_not_the_queued(tmp_path: Path) -> None:
    told = Told(tmp_path, size=1, apart=False, dies={"a": 2, "b": 2, "c": 2, "d": 2})
    assert told.run("abcd") == whole("abcd")
    assert told.pool.deaths == 8, "the queued unit saw three deaths or more, but no unit ran in more than two"


def test_with_two_calls_running_both_are_blamed_but_not_the_third(tmp_path: Path) -> None:
    told = Told(tmp_path, size=1, threads=2, poison=["a1"], slow="b")
    assert told.run("abc") == whole("abc", "a1")
    assert list(told.pool.quarantined) == ["a1"], "b died beside it, and its trial cleared it"
    assert told.noted()["trial c0"] == 0


def test_a_lost_worker_behind_an_actor_is_the_death_of_the_actor(tmp_path: Path) -> None:
    told = Told(tmp_path, size=1, loses="b")
    assert told.run("abc") == whole("abc")
    assert len(set(told.pids("work b"))) == 3, "another actor after each loss"
    assert told.pool.deaths == 2 and len(told.closed) == 3


def test_an_interrupt_in_the_consumer_kills_and_closes_all_actors(tmp_path: Path) -> None:
    told = Told(tmp_path, size=2, slow="bcdef")
    with pytest.raises(KeyboardInterrupt):
        for _ in told.pool.run(list("abcdef")):
            raise KeyboardInterrupt
    assert sorted(told.closed) == [f"eagle-{tmp_path.name}-1", f"eagle-{tmp_path.name}-2"]
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{pid}").exists() for pid in told.pids("start")):
        assert time.monotonic() < deadline, "the actors live on"
        time.sleep(0.1)


def test_actors_bear_readable_names(tmp_path: Path) -> None:
    told = Told(tmp_path, size=1, slow="ab")
    for _ in told.pool.run(list("ab")):
        assert ray.get_actor(f"eagle-{tmp_path.name}-1")


def test_actors_that_fit_nowhere_any_more_are_not_waited_for(tmp_path: Path) -> None:
    from ray_eagle.cluster import shortage

    actor = ray.remote(Fragile)
    pool = ActorPool(
        lambda name: Member(actor.options(num_cpus=400).remote(tmp_path, {})),
        1,
        "huge",
        shortage=lambda: shortage({"CPU": 400}, 1),
        patience_s=2.0,
    )
    with pytest.raises(WorkerError, match=r"huge: no actor can be placed any more.*asked for 1 x \{CPU: 400\}"):
        list(pool.run(["ab"]))
    assert shortage({"CPU": 1}, 1) is None
