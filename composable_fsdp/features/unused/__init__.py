"""Parameters without a gradient on some rank. Seam: the class of ``StepOrder``."""
