"""Tells of programs that use a shard as if it were the whole parameter."""
