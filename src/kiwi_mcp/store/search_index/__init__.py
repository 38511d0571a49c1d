"""What the database stores for search."""
