"""Values that enter and leave forwards otherwise than as tensors. Seam: ``Passage``."""
