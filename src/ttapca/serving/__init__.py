"""Adaptation in production: many streams over one network, with or without HTTP around it."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ttapca.serving.answers import Answer, Mode, StreamGlance, StreamStatus
    from ttapca.serving.onnx_export import export_onnx
    from ttapca.serving.pool import StreamPool
    from ttapca.serving.pool_limits import PoolLimits, PoolObserver
    from ttapca.serving.stream_store import StreamStore
    from ttapca.spectral.state_files import with_tensors

# They need torch, which takes long to import: the command line shows its help without it.
_LAZY = {
    "answers": ("Answer", "Mode", "StreamGlance", "StreamStatus"),
    "onnx_export": ("export_onnx",),
    "pool": ("StreamPool",),
    "pool_limits": ("PoolLimits", "PoolObserver"),
    "stream_store": ("StreamStore",),
}

__all__ = [
    "Answer", "Mode", "PoolLimits", "PoolObserver", "StreamGlance", "StreamPool", "StreamStatus",
    "StreamStore", "export_onnx", "with_tensors",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name == "with_tensors":
        return importlib.import_module("ttapca.spectral.state_files").with_tensors
    for module, names in _LAZY.items():
        if name in names:
            return getattr(importlib.import_module(f"ttapca.serving.{module}"), name)
    raise AttributeError(f"module `ttapca.serving` has no `{name}`")
