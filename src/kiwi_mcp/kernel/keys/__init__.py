"""The owner's keys, and those of publishers: who vouches for an item."""
