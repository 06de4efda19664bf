"""Parameters that a user changes between steps. Seam: ``Moments`` (``Changes``)."""
