"""OAuth, for servers that are reached by address: tokens that a person allowed once, kept sealed, renewed when due."""
