"""What all ranks compare before they go on, and programs that are refused by name."""
