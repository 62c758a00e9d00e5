"""A server that stays up until it is told to end: `ray-eagle serve`."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ray_eagle.config import Config
from ray_eagle.drafter.checkpoint import read_shape
from ray_eagle.drafter.start import new_shape
from ray_eagle.probing.stage import local_copy
from ray_eagle.run import Folder, RunFolder
from ray_eagle.serving.app import deployed
from ray_eagle.serving.client import HandleClient
from ray_eagle.target.loading import read_facts


@contextmanager
def kept(config: Config, run: RunFolder, *, random: bool = False) -> Iterator[tuple[HandleClient, str]]:
    """Deploy, and yield the client and what drafts: the run's own drafter if it is trained, else the given one, else (or
    with `random`) one with random weights. Ray must be connected; raises as `deployed`.
    """
    folder = run.of("train") if run.finished("train") else config.drafter.path and Folder.at(config.drafter.path)
    if folder and not random:
        with local_copy(folder) as local, deployed(config, drafter_folder=local) as client:
            yield client, f"the drafter of {folder.path}"
        return
    given = config.drafter.path
    facts = read_facts(config.target)
    shape = read_shape(Path(given)) if given else new_shape(config.drafter, facts, config.vocab.size)
    with deployed(config, random_shape=shape) as client:
        yield client, "a random drafter: nothing will be accepted"
