"""Tensor parallelism and experts: units whose ranks hold other parts of the model."""
