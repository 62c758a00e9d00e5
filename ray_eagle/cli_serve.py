"""`ray-eagle serve`: the server of a probe, kept up for programs and people."""

import json
import time
from typing import Any, TextIO

from ray_eagle.config import Config

HELP = "Serve the target with a drafter (the run's own, else drafter.path) until Ctrl-C, with a page to watch speculation on."


def serve_command(config: Config, run: Any, random: bool, json_output: bool, out: TextIO) -> None:
    """Print where it answers, and stay, until Ctrl-C or SIGTERM: nothing is left."""
    from ray_eagle.cluster import connect
    from ray_eagle.serving.keep import kept

    connect(config.ray)
    with kept(config, run, random=random) as (client, what):
        line = f"{client.url}/ serves {what}. Open it in a browser; Ctrl-C ends it."
        print(json.dumps({"url": client.url, "drafter": what}) if json_output else line, file=out, flush=True)
        while True:
            time.sleep(1)
