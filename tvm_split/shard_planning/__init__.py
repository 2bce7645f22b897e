"""Find plans with sharded stages, and decide whether one is better than the best plan of whole layers."""
