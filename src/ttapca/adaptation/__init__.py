"""A model that adapts: surfaces that may change, predictors of them, and streams."""
