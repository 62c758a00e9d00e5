"""`ray-eagle serve` in a process of its own: it answers, and leaves nothing when it is told to end."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from ray_eagle.preflight.processes import scan
from tests.guessing import guessing_pair


def test_it_serves_until_it_is_told_to_end(tmp_path: Path) -> None:
    target, drafter = guessing_pair(tmp_path)
    words = [sys.executable, "-m", "ray_eagle", "serve", "--json", "--run", str(tmp_path / "run")]
    words += [
        "--target.path",
        str(target),
        "--drafter.path",
        str(drafter),
        "--serve.dtype",
        "float32",
        "--serve.cpus",
        "0.5",
    ]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert process.stdout and process.stderr
        said = json.loads(process.stdout.readline())
        assert str(drafter) in said["drafter"]
        assert "Watch speculation" in httpx.get(f"{said['url']}/").text
        reply = httpx.post(f"{said['url']}/generate", json={"text": "hello", "max_new_tokens": 8}, timeout=60)
        assert len(reply.json()["tokens"]) == 8
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 130
        assert process.stderr.read().endswith("stopped: the server is gone\n")
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    deadline = time.monotonic() + 20
    while left := [p.command for p in scan().values() if str(tmp_path) in p.command]:
        assert time.monotonic() < deadline, left
        time.sleep(0.2)
    with pytest.raises(httpx.ConnectError):
        httpx.get(said["url"])
