"""ray_eagle: tell whether an EAGLE-3 drafter makes a language model faster, and train one that does."""

import os

# A local `ray.init` turns token authentication on by itself and clients do not follow: decide it on both sides.
os.environ.setdefault("RAY_AUTH_MODE", "disabled")

__version__ = "0.1.0"
