"""Help for training loops; reached by public names alone."""
