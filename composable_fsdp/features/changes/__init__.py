"""Parameters that a user changes between steps. Seam: ``tree.moments.changes``."""
