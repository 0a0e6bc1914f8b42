"""Run independent tasks in this process, in several processes, or on other machines."""

from __future__ import annotations

from ttapca.engines.engine import Engine, Finished, Lost, SerialEngine, engine_of

__all__ = ["Engine", "Finished", "Lost", "SerialEngine", "engine_of"]
