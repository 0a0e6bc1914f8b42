"""Compare methods: what is measured, how, and where the numbers are kept.

- `cells`: a *cell* is one number of a table with everything that leads to it; its full key.
- `results`: one SQLite file holds all cells; a killed run leaves every finished one in it.
"""

from __future__ import annotations

from ttapca.bench.cells import Cell, Observation, Outcome, Row, Setting
from ttapca.bench.results import Results

__all__ = ["Cell", "Observation", "Outcome", "Results", "Row", "Setting"]
