"""Settings of the ranks that run integrations."""

from __future__ import annotations

import os

# Outside torchrun, accelerate sets the number of threads with a warning, which ranks
# would raise. Ranks take the environment of the parent when they start.
os.environ.setdefault("OMP_NUM_THREADS", "1")
