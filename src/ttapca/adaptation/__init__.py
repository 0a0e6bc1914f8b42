"""A model that adapts: surfaces that may change, movers of them, and streams."""
