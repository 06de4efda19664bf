"""Optimizers that need whole matrices, each computed on a single rank."""
