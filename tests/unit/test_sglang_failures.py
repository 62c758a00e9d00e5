"""Servers under the sglang engine that die, hang or do not come back: a failed engine, which says why."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from ray_eagle.errors import ConfigError, ServingError
from ray_eagle.serving import child, supervisor
from ray_eagle.serving.engine import Speculation, Work
from tests.standin import plain_answer
from tests.unit import test_sglang_engine
from tests.unit.test_sglang_engine import start

own_state, engine = test_sglang_engine.own_state, test_sglang_engine.engine


def test_a_server_that_dies_is_a_failed_engine(tmp_path: Path) -> None:
    engine = start(tmp_path)
    engine.check()
    os.kill(engine._current.child.pid, signal.SIGKILL)
    with pytest.raises(ServingError, match=r"(?s)the server died.*the stand-in reads its weights"):
        for _ in range(100):
            engine.check()
            time.sleep(0.05)
    engine.close()


def test_a_server_without_its_scheduler_is_ended(tmp_path: Path) -> None:
    """SGLang's launcher outlives it by 5 to 15 s, and its children's memory with it."""
    engine = start(tmp_path)
    mark = engine._current.child.mark
    [scheduler] = [p for p in supervisor.marked(mark) if supervisor.command_line(p).startswith("sglang::scheduler")]
    engine.check()
    os.kill(scheduler, signal.SIGKILL)
    with pytest.raises(ServingError, match=r"process sglang::scheduler 1000 \(\d+\) died"):
        for _ in range(100):
            engine.check()
            time.sleep(0.05)
    assert supervisor.marked(mark) == set()
    with pytest.raises(ServingError, match="died"):
        engine.check()
    engine.close()


def test_a_server_that_dies_in_an_answer_breaks_it_off(tmp_path: Path) -> None:
    engine = start(tmp_path, mode="dies-in-answer")
    (tmp_path / "file").touch()
    with pytest.raises(ServingError, match=r"(?s)broke off.*The end of its log"):
        engine.generate([Work([7], 30)])
    with pytest.raises(ServingError, match="died"):
        for _ in range(100):
            engine.check()
            time.sleep(0.05)
    engine.close()


def test_a_server_that_falls_silent_in_an_answer_hangs(tmp_path: Path) -> None:
    engine = start(tmp_path, mode="hangs-in-answer", hang_s=0.5)
    with pytest.raises(ServingError, match=r"hangs: nothing for 0\.5 s"):
        engine.generate([Work([7], 30)])
    with pytest.raises(ServingError, match="hangs"):
        engine.check()
    engine.close()


def test_an_idle_server_that_stops_answering_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "HEALTH_S", 0.2)
    monkeypatch.setattr(child, "HEALTH_EVERY_S", 0.0)
    engine = start(tmp_path, mode="stalls", hang_s=0.5)
    (tmp_path / "file").touch()
    with pytest.raises(ServingError, match=r"(?s)hangs: no answer for 0\.5 s.*its log"):
        for _ in range(20):
            engine.check()
    engine.close()


def test_a_restart_that_fails_is_a_failed_engine(tmp_path: Path) -> None:
    engine = start(tmp_path, mode="dies-plain")
    with pytest.raises(ServingError, match="CUDA out of memory"):
        engine.configure(None)
    with pytest.raises(ServingError, match="CUDA out of memory"):
        engine.check()
    with pytest.raises(ServingError, match="CUDA out of memory"):
        engine.generate([Work([1], 4)])
    engine.close()


def test_what_a_server_cannot_do_leaves_the_running_one_alone(
    engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: Any) -> list[str]:
        raise ConfigError("no trees here")

    before = engine.facts()
    with monkeypatch.context() as patch:
        patch.setattr(engine._dialect, "command", refuse)
        with pytest.raises(ConfigError, match="no trees"):
            engine.configure(Speculation(steps=2, topk=4, draft_tokens=8))
    engine.check()
    assert engine.facts() == before


def test_a_restart_that_succeeds_forgets_the_failure_before(tmp_path: Path) -> None:
    engine = start(tmp_path, mode="dies-plain")
    with pytest.raises(ServingError, match="CUDA out of memory"):
        engine.configure(None)
    engine.configure(Speculation(steps=2))
    engine.check()
    assert engine.generate([Work([5], 9)])[0].tokens == plain_answer([5], 9)
    engine.close()
    with pytest.raises(ServingError, match="starts no more"):
        engine.configure(None)
