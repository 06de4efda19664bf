"""The runtime of a step: hooks, all-gathers, reductions and recovery after errors."""
