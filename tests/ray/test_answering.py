"""The driver and the servers of `generate` die and fail; no prompt is lost or answered twice."""

from pathlib import Path

from tests.ray.answering import trial


def test_failing_servers_and_a_driver_killed_three_times_give_each_prompt_its_conversation_once(
    tmp_path: Path, target_folder: Path
) -> None:
    """`python -m tests.ray.answering` runs it with 10,000 prompts."""
    figures = trial(tmp_path, target_folder, prompts=1500, kills=3)
    assert all(figures["servers"][fault] > 0 for fault in ("failed", "stalled", "cut"))
