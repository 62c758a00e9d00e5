"""One driver of a cluster at a time starts or ends Serve: two at once would take each other's app for their own, or shut
Serve down under the other's."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import ray

from ray_eagle.errors import ServingError

NAME, NAMESPACE = "serving", "ray_eagle"
WAIT_S = 120.0
AGAIN_S = 0.1


class _Claim:
    """Its name is taken while it lives: until the claim is given back, or its driver has died."""


@contextmanager
def claimed() -> Iterator[None]:
    """Be the only one for a moment. Raises ServingError when another driver is for longer than WAIT_S."""
    deadline = time.monotonic() + WAIT_S
    while True:
        try:
            claim = ray.remote(_Claim).options(name=NAME, namespace=NAMESPACE, num_cpus=0).remote()
            break
        except (ValueError, AssertionError):  # the name is taken; Ray trips over one whose driver has just died
            if time.monotonic() > deadline:
                raise ServingError(
                    f"server: expected to start or end Ray Serve within {WAIT_S:g} s, found another driver that does so all "
                    "the time. Wait for it, or end it."
                ) from None
            time.sleep(AGAIN_S)
    try:
        yield
    finally:
        ray.kill(claim)
