"""The public names of `ttapca.serving`, each imported when it is first used."""

from ttapca.serving.limits import PoolLimits as PoolLimits
from ttapca.serving.onnx_export import export_onnx as export_onnx
from ttapca.serving.pool import PoolObserver as PoolObserver
from ttapca.serving.pool import StreamPool as StreamPool
from ttapca.serving.request_queue import Answer as Answer
from ttapca.serving.stream_record import Mode as Mode
from ttapca.serving.stream_record import StreamGlance as StreamGlance
from ttapca.serving.stream_record import StreamStatus as StreamStatus
from ttapca.serving.stream_store import StreamStore as StreamStore
from ttapca.spectral.state_files import with_tensors as with_tensors
