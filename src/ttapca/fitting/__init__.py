"""From a model and source data to a fitted filter, to a layer of a model, and to disk."""
