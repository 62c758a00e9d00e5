"""The vocab stage as a Ray job.

ray job submit --address http://127.0.0.1:8265 --working-dir . -- python jobs/vocab.py -c run.yaml
"""

import sys

from ray_eagle.cli import main

main(["vocab", *sys.argv[1:], "--in-job"])
