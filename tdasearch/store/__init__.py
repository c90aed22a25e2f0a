"""An index on disk: its manifest, its table of documents, the search index over their codes, and the writer's lock."""
