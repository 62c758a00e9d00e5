"""Checks before anything expensive starts: artifacts, machine, cluster, and what the run will cost."""
