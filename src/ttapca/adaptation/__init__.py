"""A model that adapts: surfaces that may change, what moves them, when they forget."""
