"""Strategies for the Trainer and for Fabric of Lightning."""
