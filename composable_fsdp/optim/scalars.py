"""Names of optimizer state that is one number per parameter."""

SCALARS = ("step", "mu_product", "eta", "mu")
"""Those of ``torch.optim``. For a parameter without dimensions the shape does not tell
them from element-wise state."""
