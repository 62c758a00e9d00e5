"""The draft vocabulary: settings `vocab.*`."""

from ray_eagle.config.section import Positive, Section


class VocabConfig(Section):
    """Which tokens the drafter may say."""

    size: Positive = 32000
    """Draft vocabulary D; all of the target's vocabulary when larger than that."""
    report_sizes: tuple[Positive, ...] = (1000, 2000, 4000, 8000, 16000, 32000, 64000)
    """Sizes whose coverage is reported beside it."""
    keep_given: bool = True
    """Keep the map of a given drafter, whatever `size` says. Off chooses a new one, and training moves its head rows to it."""
