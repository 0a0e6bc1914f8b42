"""One rank of a job; `test_ranks.py` starts two of them. Arguments: rank, ranks, folder."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parents[1]))

import ttapca
from fitting.parted import parts_of
from oracles import images, small_convnet
from ttapca.engines import SerialEngine
from ttapca.errors import TtapcaError
from ttapca.fitting.store import filter_config, filter_tensors

DATA = images(420)
CUT = 150  # the first rank has the samples before it


def own(rank: int) -> torch.Tensor:
    return DATA[:CUT] if rank == 0 else DATA[CUT:]


def fits(rank: int) -> dict[str, dict[str, Any]]:
    """Arguments of `fit` for each case."""
    samples, bad = own(rank), own(rank).clone()
    bad[7] = torch.nan if rank == 1 else bad[7]
    interleaved = torch.utils.data.DataLoader(DATA[rank::2], batch_size=16)
    return {
        "loader": {"data": interleaved},
        "alone": {"data": samples, "engine": SerialEngine()},
        "NaN in rank 1": {"data": bad},
        "gram": {"data": samples, "route": "gram"},
        "other weights": {"data": samples, "model": small_convnet(seed=rank)},
        "an engine": {"data": parts_of(samples, [50]), "engine": "joblib:2"} if rank else {},
        "tensors": {"data": samples},  # the group works after all these failures
    }


def main(rank: int, ranks: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder}/meeting"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    messages = {}
    for name, given in fits(rank).items():
        if not given:
            continue
        model = given.pop("model", None) or small_convnet()
        try:
            fitted = ttapca.fit(model, "conv1", n_components=12, **given)
        except TtapcaError as error:
            messages[name] = f"{type(error).__name__}: {error}"
            continue
        tensors = filter_tensors(fitted, torch.float64)
        config = json.dumps(filter_config(fitted, "float64"))
        file = folder / f"{name} {rank}.safetensors"
        save_file({k: v.contiguous() for k, v in tensors.items()}, file, {"config": config})
    (folder / f"{rank}.json").write_text(json.dumps(messages))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
