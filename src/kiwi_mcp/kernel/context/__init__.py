"""Context: what definitions and answers cost the model that reads them, and what would cost it less."""
