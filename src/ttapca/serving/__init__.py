"""Adaptation behind HTTP: many streams over one network."""
