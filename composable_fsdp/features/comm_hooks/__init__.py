"""Functions that replace the collectives of gradients, through ``ReduceRule.hook``."""
