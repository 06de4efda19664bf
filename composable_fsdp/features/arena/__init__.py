"""Full parameters at addresses that do not change, through ``FullForm.arena_slot``."""
