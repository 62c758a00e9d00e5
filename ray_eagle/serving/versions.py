"""What differs between SGLang versions: flags, and the names of what they report. Read in the sources of each release."""

import re
from dataclasses import dataclass

from ray_eagle.errors import ConfigError


@dataclass(frozen=True)
class Release:
    """Names in one release."""

    histogram: tuple[str, ...]
    """Keys of `meta_info` with passes by accepted drafts, newest name first."""
    correct: tuple[str, ...]
    """Keys of `meta_info` with the accepted drafts of all passes."""
    graph_batch: str = "--cuda-graph-max-bs-decode"
    """Flag of the largest batch size that CUDA graphs are captured for."""
    running: str = "effective_max_running_requests_per_dp"
    """Key of `/server_info` internal_states: requests that really run together."""


# until 0.5.20 the former names were kept as aliases
_WITH_ALIASES = Release(
    histogram=("spec_correct_drafts_histogram", "spec_accept_histogram"),
    correct=("spec_num_correct_drafts", "spec_accepted_drafts"),
)
_NEW_NAMES = Release(histogram=("spec_correct_drafts_histogram",), correct=("spec_num_correct_drafts",))

RELEASES = {
    "0.5.17": _WITH_ALIASES,
    "0.5.18": _WITH_ALIASES,
    "0.5.19": _WITH_ALIASES,
    "0.5.20": _WITH_ALIASES,
    "0.5.21": _NEW_NAMES,
    "0.5.22": _NEW_NAMES,
    "0.5.23": _NEW_NAMES,
}
"""Every one of these drafts with `--speculative-algorithm EAGLE3`; `EAGLE` loads the same files and accepts nothing."""


def release_of(version: str, treat_as: str | None = None) -> Release:
    """The names of an installed version (post-releases and local builds as their release), or of the one to treat it as.

    Raises ConfigError for a version that is not in the table.
    """
    wanted = treat_as or version
    found = re.match(r"\d+\.\d+\.\d+", wanted)
    release = RELEASES.get(found.group()) if found else None
    # a release candidate may have the names of neither neighbour
    if release is None or re.match(r"\d+\.\d+\.\d+(rc|a|b|\.dev)", wanted):
        known = sorted(RELEASES)
        raise ConfigError(
            f"sglang {wanted}: expected a version from {known[0]} to {known[-1]}, whose flags and figures are known. Install "
            f"one of them, or, if its names have not changed, say which one it resembles: serve.version {known[-1]}."
        )
    return release
