"""Schema migrations: numbered steps, one folder for each dialect, applied in order and never changed."""
