"""Names of optimizer state that is a single number per parameter."""

SCALARS = ("step", "mu_product", "eta", "mu")
"""State names in ``torch.optim``. For a 0-d parameter, the shape does not distinguish
such state from element-wise state."""
