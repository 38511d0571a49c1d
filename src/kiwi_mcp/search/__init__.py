"""A need in, ranked cards out."""
