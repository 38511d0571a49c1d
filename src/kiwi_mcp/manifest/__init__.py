"""Text to trust: parse, type sheets, check, parameters, digest, sign, render."""
