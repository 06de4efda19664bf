"""What plans, simulates and inspects; the package below imports nothing of it."""
