"""What reaches stdout and stderr: results on the one, words of ours on the other, nothing of the libraries' own."""

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from ray_eagle.config import Config


@contextmanager
def stdout_for_results() -> Iterator[TextIO]:
    """Yields the real stdout, and sends whatever libraries print there to stderr meanwhile."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    out = os.fdopen(os.dup(kept), "w")
    try:
        yield out
    finally:
        out.close()
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def quiet(config: Config) -> None:
    """Libraries' own bars and greetings are not ours to show. They read these variables when they are imported."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    if not any(str(source).startswith("hub:") for source in (config.generate.prompts, config.probe.prompts)):
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
    for name in ("ray.serve", "ray.train", "ray.data", "ray"):
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.getLogger("ray.serve").addFilter(_is_warning)  # Serve sets its level anew when it is imported


def _is_warning(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.WARNING
