"""Tools for other people's modules and for files; they know nothing of filters."""
