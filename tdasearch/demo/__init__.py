"""The demo: a small real model, a corpus with altered facts, and the search for the documents behind what it now says."""
