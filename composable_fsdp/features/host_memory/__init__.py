"""Memory that leaves the device for the host: of models that sleep, and of states."""
