"""Adaptation in production: many streams over one network, with or without HTTP around it."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ttapca.serving.limits import PoolLimits
    from ttapca.serving.onnx_export import export_onnx
    from ttapca.serving.pool import PoolObserver, StreamPool
    from ttapca.serving.request_queue import Answer
    from ttapca.serving.stream_record import Mode, StreamGlance, StreamStatus
    from ttapca.serving.stream_store import StreamStore
    from ttapca.spectral.state_files import with_tensors

# They need torch, which takes long to import: the command line shows its help without it.
_MODULES = {
    "Answer": "ttapca.serving.request_queue",
    "Mode": "ttapca.serving.stream_record",
    "PoolLimits": "ttapca.serving.limits",
    "PoolObserver": "ttapca.serving.pool",
    "StreamGlance": "ttapca.serving.stream_record",
    "StreamPool": "ttapca.serving.pool",
    "StreamStatus": "ttapca.serving.stream_record",
    "StreamStore": "ttapca.serving.stream_store",
    "export_onnx": "ttapca.serving.onnx_export",
    "with_tensors": "ttapca.spectral.state_files",
}

__all__ = [
    "Answer", "Mode", "PoolLimits", "PoolObserver", "StreamGlance", "StreamPool", "StreamStatus",
    "StreamStore", "export_onnx", "with_tensors",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    raise AttributeError(f"module `ttapca.serving` has no `{name}`")
