"""Adaptation in production: many streams over one network, with or without HTTP around it."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ttapca.serving.answers import Answer, Mode, PoolObserver, StreamGlance, StreamStatus
    from ttapca.serving.limits import PoolLimits
    from ttapca.serving.onnx_export import export_onnx
    from ttapca.serving.pool import StreamPool
    from ttapca.serving.stream_store import StreamStore
    from ttapca.spectral.state_files import with_tensors

# They need torch, which takes long to import: the command line shows its help without it.
_MODULES = {
    "ttapca.serving.answers": ("Answer", "Mode", "PoolObserver", "StreamGlance", "StreamStatus"),
    "ttapca.serving.limits": ("PoolLimits",),
    "ttapca.serving.onnx_export": ("export_onnx",),
    "ttapca.serving.pool": ("StreamPool",),
    "ttapca.serving.stream_store": ("StreamStore",),
    "ttapca.spectral.state_files": ("with_tensors",),
}

__all__ = [
    "Answer", "Mode", "PoolLimits", "PoolObserver", "StreamGlance", "StreamPool", "StreamStatus",
    "StreamStore", "export_onnx", "with_tensors",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module `ttapca.serving` has no `{name}`")
