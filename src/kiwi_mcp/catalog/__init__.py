"""Where items are found, and the chain of each item."""
