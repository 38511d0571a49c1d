"""What ships as data: type sheets, built-in tools, help pages."""
