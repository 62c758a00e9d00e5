"""What a death means: the pool's verdicts, told as sequences of events on a clock of our own."""

import pickle

import pytest

from ray_eagle.errors import WorkerError, WorkerLost
from ray_eagle.pool.blame import Blame, Death, Job, Trial

NEWS_S = 10.0


class World:
    """A clock, nodes A and B, and a unit of three samples that dies when told."""

    def __init__(self, *, apart: bool = True) -> None:
        self.now, self.alive = 100.0, {"A", "B"}
        names = (lambda unit: [f"{unit}{i}" for i in range(3)]) if apart else None
        self.blame = Blame("pool", names, NEWS_S, lambda: frozenset(self.alive), lambda: self.now)
        self.job = Job("u")

    def die(self, *nodes: str, fresh: bool = True) -> None:
        """The running job kills an actor on each of the nodes, a second apart."""
        for node in nodes:
            self.now += 1
            self.blame.died(self.job, Death(node, self.now, "killed"), fresh=fresh)

    def next(self) -> str:
        return self.blame.next(self.job)

    def pass_all(self) -> None:
        while self.trial.todo:
            self.trial.passed()

    def hear(self, node: str) -> None:
        """An actor made now gets ready there."""
        self.now += 1
        self.blame.heard(node, self.now)

    @property
    def trial(self) -> Trial:
        assert self.job.trial
        return self.job.trial


def test_two_deaths_are_borne_but_alone_and_the_third_means_trial() -> None:
    world = World()
    assert not world.job.alone
    world.die("A", "B")
    assert world.next() == "run" and world.job.alone
    world.die("A")
    assert world.next() == "try" and list(world.trial.todo) == [0, 1, 2]


@pytest.mark.parametrize("lost", [{"A"}, {"A", "B"}])
def test_deaths_on_a_dead_node_are_forgiven_whenever_its_death_is_learnt(lost: set[str]) -> None:
    world = World(apart=False)
    world.die("A", "B", "A")
    assert world.next() == "wait", "the nodes may be dead, and Ray not know it yet"
    world.now += NEWS_S - 1
    assert world.next() == "wait"
    world.alive -= lost
    assert world.next() == "run"
    assert len(world.job.deaths) == (1 if lost == {"A"} else 0)


def test_a_verdict_waits_for_news_of_every_node_or_for_time() -> None:
    for settle in (lambda w: (w.hear("A"), w.hear("B")), lambda w: setattr(w, "now", w.now + NEWS_S + 1)):
        world = World(apart=False)
        world.die("A", "B", "A")
        world.blame.heard("A", world.now - 2), world.blame.heard("B", world.now - 2)
        assert world.next() == "wait", "these actors were made before the last deaths, and prove nothing"
        settle(world)
        with pytest.raises(WorkerError, match=r"pool: unit u was running in 3 actors that died.*killed"):
            world.next()


def test_a_sample_is_set_aside_after_three_settled_deaths_of_fresh_actors_and_the_rest_runs() -> None:
    world = World()
    world.die("A", "A", "A")
    world.next()
    world.trial.passed()
    world.die("A", fresh=False)
    world.die("A", "A")
    assert world.trial.todo[0] == 1, "the death of a used actor does not count"
    world.die("A")
    assert list(world.trial.todo) == [2]
    world.trial.passed()
    assert world.next() == "wait" and not world.blame.quarantined
    world.hear("A")
    assert world.next() == "run"
    assert world.blame.quarantined.keys() == world.job.without == {"u1"}
    assert world.job.trial is None and not world.job.alone, "it starts anew"
    world.die("A", "A", "A")
    assert world.next() == "try" and list(world.trial.todo) == [0, 2]


def test_a_success_between_clears_a_sample() -> None:
    world = World()
    world.die("A", "A", "A")
    world.next()
    world.die("A", "A")
    world.pass_all()
    assert world.next() == "run" and not world.blame.quarantined and world.job.acquitted


def test_samples_whose_node_turns_out_dead_are_tried_again_once_each() -> None:
    world = World()
    world.die("A", "A", "A")
    world.next()
    world.die("B", "B", "B")
    world.trial.passed()
    world.die("A", "A", "A")
    assert world.next() == "wait"
    world.alive.remove("B")
    assert world.next() == "try" and list(world.trial.todo) == [0]
    world.trial.passed()
    world.hear("A")
    assert world.next() == "run" and world.job.without == {"u2"}


def test_a_unit_that_dies_only_as_a_whole_ends_the_run_after_one_acquittal() -> None:
    world = World()
    world.die("A", "A", "A")
    world.next()
    world.pass_all()
    assert world.next() == "run"
    world.die("A", "A")
    assert world.next() == "run"
    world.die("A")
    assert world.next() == "wait"
    world.hear("A")
    with pytest.raises(WorkerError, match=r"unit u.*each of its samples survives alone.*extract.tokens_per_batch"):
        world.next()


def test_a_lost_worker_travels_whole() -> None:
    lost = pickle.loads(pickle.dumps(WorkerLost("stage 2 died", node="A")))
    assert (str(lost), lost.node) == ("stage 2 died", "A")
