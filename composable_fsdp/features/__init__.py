"""Features above the core, each in a folder of its own; ``defaults`` installs them."""
