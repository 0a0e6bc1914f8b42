"""A model that adapts: surfaces that may change, movers that move them, and streams that remember."""
