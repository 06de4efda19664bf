"""Wire formats of all-gathers."""
