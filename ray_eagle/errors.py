"""The one family of errors that users see.

Each message says what went wrong and where, what was expected, what was found, and the way out. The command line prints
the message alone; a traceback only with `--debug`.
"""


class EagleError(Exception):
    """Any failure that ray_eagle explains. The process exits with 1."""


class ConfigError(EagleError):
    """The settings or the command line are wrong. The process exits with 2."""


class InputError(EagleError):
    """A file that a user or another tool made is missing, damaged or of the wrong shape."""


class TargetError(EagleError):
    """The target model cannot be used as asked."""


class CheckpointError(InputError):
    """A drafter folder is incomplete, damaged or does not fit the target."""


class DatasetError(InputError):
    """A hidden-state dataset is incomplete, damaged or was planned otherwise."""


class LockedError(InputError):
    """Another process writes into the folder, or may."""


class OriginError(EagleError):
    """An artifact in the run folder was made from other settings or inputs than the ones in use now."""


class QuarantineError(EagleError):
    """Samples had to be set aside; everything else was done."""


class WorkerError(EagleError):
    """Actors or workers died or failed more often than they may."""


class WorkerLost(EagleError):
    """Raised by an actor that leads others when one of them died: to the pool it is the death of the whole group."""

    def __init__(self, message: str, node: str = "") -> None:
        super().__init__(message)
        self.node = node
        """Id of that node, where known: the pool looks later whether it died, since Ray learns of that late."""


class ServingError(EagleError):
    """The speculative server did not start, died, or answered something unusable."""


def explain(what: str, *, where: object, expected: object, found: object, fix: str) -> str:
    """Format the five parts of an error message on one line."""
    return f"{what}: {where}: expected {expected}, found {found}. {fix}"
