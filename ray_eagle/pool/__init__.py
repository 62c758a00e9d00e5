"""A pool of actors that works through units, each exactly once, however often actors, and nodes under them, die."""

from ray_eagle.pool.actors import ActorPool, Member, this_node

__all__ = ["ActorPool", "Member", "this_node"]
