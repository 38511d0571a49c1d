"""The owner's memory: files in one folder with their history. It imports nothing but `domain`."""
