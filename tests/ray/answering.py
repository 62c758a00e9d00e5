"""Thousands of prompts against servers that fail, stall, cut JSON short and die, and a driver that is killed again and again.

python -m tests.ray.answering --prompts 10000 --kills 3
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import yaml

from ray_eagle.conversations.conversation import read_conversations
from ray_eagle.run import RunFolder
from ray_eagle.serving.child import free_port
from tests.answers import said
from tests.tiny import tiny_target

SERVERS = 3
FAULTS = {"fail": 0.05, "stall": 0.01, "cut": 0.02, "delay": 0.02}
PROGRAM = Path(__file__).parents[1] / "answers.py"


def counts(port: int) -> dict[str, int]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/counts", timeout=5) as response:
        return json.load(response)


def start_server(port: int, seed: int, **faults: float) -> subprocess.Popen[bytes]:
    """Returns when it listens."""
    words = [word for name, value in faults.items() for word in (f"--{name}", str(value))]
    words += ["--port", str(port), "--seed", str(seed)]
    server = subprocess.Popen([sys.executable, "-S", "-E", str(PROGRAM), *words])
    for _ in range(200):
        try:
            counts(port)
            return server
        except OSError:
            time.sleep(0.05)
    server.kill()
    raise AssertionError(f"the server on port {port} does not listen")


class Servers:
    """Several of them; the first can be killed and started again on its port."""

    def __init__(self, count: int, seed: int) -> None:
        self.ports = [free_port() for _ in range(count)]
        self.seed = seed
        self.running = [start_server(port, seed + i, **FAULTS) for i, port in enumerate(self.ports)]
        self.lost: dict[str, int] = {}

    @property
    def urls(self) -> list[str]:
        return [f"http://127.0.0.1:{port}" for port in self.ports]

    def kill_and_restart(self, pause_s: float = 1.5) -> None:
        self.lost = counts(self.ports[0])
        self.running[0].kill()
        self.running[0].wait()
        time.sleep(pause_s)
        self.running[0] = start_server(self.ports[0], self.seed + 100, **FAULTS)

    def counts(self) -> dict[str, int]:
        all_of = [self.lost, *map(counts, self.ports)]
        return {key: sum(one.get(key, 0) for one in all_of) for key in all_of[-1]}

    def close(self) -> None:
        for server in self.running:
            server.kill()
            server.wait()


def write_prompts(path: Path, count: int) -> dict[str, tuple[str, ...]]:
    """Every tenth has two turns."""
    prompts = {f"p{i}": (f"Question {i * 7919 % 100003}?", "And more?")[: 1 + (i % 10 == 0)] for i in range(count)}
    path.write_text("".join(json.dumps({"id": i, "turns": turns}) + "\n" for i, turns in prompts.items()))
    return prompts


def expected(turns: tuple[str, ...]) -> list[dict[str, Any]]:
    """The conversation that these prompts must give: said one by one."""
    messages: list[dict[str, Any]] = []
    for turn in turns:
        messages.append({"role": "user", "content": turn})
        messages.append(said(messages))
    return messages


@contextmanager
def driver(config: Path, log: Path):
    """`ray-eagle generate` as a process of its own."""
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with log.open("ab") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "ray_eagle", "generate", "-c", str(config)], env=environment, stdout=out, stderr=out
        )
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def parts(folder: Path) -> int:
    return len(list(folder.glob("part-*.jsonl")))


def trial(folder: Path, target: Path, prompts: int, kills: int, seed: int = 0) -> dict[str, Any]:
    """Run it; asserts that each prompt has exactly its own conversation. Returns figures."""
    rng = random.Random(seed)
    asked = write_prompts(folder / "prompts.jsonl", prompts)
    made = folder / "run" / "conversations"
    batch = 32
    whole = -(-prompts // batch)
    moments = sorted(rng.sample(range(1, max(2 + kills, int(whole * 0.9))), kills))
    death = rng.randrange(1, max(2, moments[0] if moments else whole // 2))
    log = folder / "log.txt"
    killed_at: list[int] = []
    began = time.monotonic()
    with ExitStack() as stack:
        servers = Servers(SERVERS, seed)
        stack.callback(servers.close)
        settings = {
            "prompts": str(folder / "prompts.jsonl"),
            "backend": "openai",
            "urls": servers.urls,
            "in_flight": 32,
            "timeout_s": 2,
            "server_wait_s": 30,
            "max_new_tokens": 64,
            "batch_size": batch,
            "held_out_share": 0.0,
        }
        config = folder / "run.yaml"
        run = {"run": str(folder / "run"), "target": {"path": str(target)}, "generate": settings}
        config.write_text(yaml.safe_dump(run))
        chaos: threading.Thread | None = None
        for moment in [*moments, None]:
            with driver(config, log) as process:
                while process.poll() is None:
                    done = parts(made)
                    if chaos is None and done >= death:
                        chaos = threading.Thread(target=servers.kill_and_restart)
                        chaos.start()
                    if moment is not None and done >= moment:
                        process.send_signal(signal.SIGKILL)
                        process.wait()
                        killed_at.append(parts(made))
                        break
                    time.sleep(0.01)
                if moment is None:
                    assert process.returncode == 0, log.read_text()
        assert chaos is not None
        chaos.join()
        seconds, faults = time.monotonic() - began, servers.counts()
    assert len(killed_at) == kills and all(n < whole for n in killed_at), killed_at
    conversations = list(read_conversations(RunFolder.open(str(folder / "run")).of("generate")))
    names = [c.source_id for c in conversations]
    assert len(names) == len(set(names)) == prompts and set(names) == set(asked)
    for c in conversations:
        assert c.messages == expected(asked[c.source_id]), c.source_id
        assert c.finish_reasons == ["stop"] * len(asked[c.source_id]) and not c.note
    assert (made / "rejected.jsonl").read_bytes() == b""
    assert f"{prompts:,} rows: {prompts:,} kept, 0 rejected" in log.read_text()
    return {
        "prompts": prompts,
        "conversations": len(names),
        "driver killed after parts": killed_at,
        "of parts": whole,
        "seconds": round(seconds, 1),
        "servers": faults,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--prompts", type=int, default=10_000)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures = trial(Path(folder), tiny_target(Path(folder) / "target"), args.prompts, args.kills, seed=args.seed)
    sys.stdout.write(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
