"""Where independent tasks are run: in this process, in others, or on other machines.

    for ending in engine_of("joblib:4").run(tasks, work):
        ...

An engine knows nothing of what it runs; see `Engine` for what it promises.
"""

from __future__ import annotations

from ttapca.engines.engine import Engine, Finished, Lost, SerialEngine, engine_of

__all__ = ["Engine", "Finished", "Lost", "SerialEngine", "engine_of"]
