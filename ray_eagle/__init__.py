"""ray_eagle: tell whether an EAGLE-3 drafter makes a language model faster, and train one that does."""

import os

# A local `ray.init` turns token authentication on by itself and clients do not follow: decide it on both sides.
os.environ.setdefault("RAY_AUTH_MODE", "disabled")
# When Serve shuts down in order, Ray tells every driver that Serve's own calls fail and will be retried for ever.
os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", r"Task ServeController\.\w+ failed\. There are infinite retries")

__version__ = "0.1.0"
