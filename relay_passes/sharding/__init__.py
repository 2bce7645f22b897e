"""Sharding: several machines compute a region of the graph together. `emit.shard` is the entry."""
