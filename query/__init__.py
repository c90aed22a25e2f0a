"""Query to documents: search, exact rescoring, explanation."""
