"""Adapters to the frameworks that users train in."""
