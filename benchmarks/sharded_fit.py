"""A fit whose data are read by several processes, from a source that makes them wait.

Measures one, two and four processes, compares them with a model of the time, and says with the same
model what a thousand workers would take for a billion images.

    python benchmarks/sharded_fit.py [--seconds 320] [--again]

Times of fits are by the clock on the wall, since waiting is what is measured.
"""

from __future__ import annotations

import argparse
import io
import math
import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from PIL import Image
from torch import Tensor, nn

import measuring
import ttapca
from measuring import Goal, Result, Table
from ttapca.datasets.pictures import PictureSize, open_picture, picture_pixels
from ttapca.engines import engine_of
from ttapca.fitting.plan import Parallelism, Problem, RouteCost, route_cost
from ttapca.spectral.cosine import CoefficientMoments
from ttapca.spectral.pca import Moments

PARTS, BATCHES, BATCH = 32, 4, 25
SHAPE = (3, 16, 16)
PROCESSES = (1, 2, 4)
LAYER = "0"

# What is predicted.
IMAGES, WORKERS = 10**9, 1000
LINK = 1.25e9  # bytes a second between two machines: 10 Gbit/s
STORAGE = 1e8  # bytes a second that a worker reads
PHOTOGRAPH = 110_000  # bytes, as in ImageNet
SMALL_IMAGE = 3 * 32 * 32  # bytes
LONG, LARGE = (16, 32, 32), (3, 224, 224)
MEASURED = 2048  # numbers of the samples that the rate of moments is measured with


@dataclass(frozen=True)
class SlowPart:
    """Images that take their time to arrive."""

    number: int
    seconds: float  # for each batch

    def __len__(self) -> int:
        return BATCHES * BATCH

    def __iter__(self) -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(self.number)
        for _ in range(BATCHES):
            time.sleep(self.seconds)
            yield torch.rand(BATCH, *SHAPE, generator=generator)


@dataclass(frozen=True)
class SlowParts:
    """All of them."""

    parts: Sequence[SlowPart]
    batch_size: int = BATCH

    def __iter__(self) -> Iterator[Tensor]:
        return (batch for part in self.parts for batch in part)


def parts(seconds: float) -> SlowParts:
    """So many seconds of waiting in all."""
    return SlowParts([SlowPart(number, seconds / PARTS / BATCHES) for number in range(PARTS)])


def network() -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Flatten())
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.copy_(torch.rand(tensor.shape, generator=generator) - 0.3)
    return model.eval()


def seconds_of(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def begin(_: int) -> None:
    """What a worker loads before it reads."""


def run(options: argparse.Namespace) -> Result:
    model, waiting = network(), options.seconds
    engines = {count: engine_of(f"joblib:{count}" if count > 1 else None) for count in PROCESSES}

    def fit(seconds: float, processes: int) -> ttapca.FittedFilter:
        return ttapca.fit(model, LAYER, parts(seconds), 100, engine=engines[processes])

    fit(0.0, 1)
    computing = seconds_of(lambda: fit(0.0, 1))

    def start(count: int) -> list[object]:
        return list(engines[count].run(range(count), begin))

    starting = {count: seconds_of(partial(start, count)) for count in PROCESSES}
    measured, found = {}, {}
    for count in PROCESSES:
        begun = time.perf_counter()
        found[count] = fit(waiting, count)
        measured[count] = time.perf_counter() - begun
        print(f"  {count} processes: {measured[count]:.1f} s, load {measuring.load_average():.1f}")
    first = waiting / PARTS / BATCHES  # the batch that is looked at first
    predicted = {
        count: starting[count] * (count > 1) + first + waiting / count + computing
        for count in PROCESSES
    }
    away = max(
        float((each.singular_values_ / found[1].singular_values_ - 1).abs().max())
        for each in found.values()
    )
    rates = measured_rates()
    numbers = {
        "measured": measured,
        "predicted": predicted,
        "starting": starting,
        "computing": computing,
        "rates": rates,
        "away": away,
    }
    return Result(
        title="A fit of shards",
        text=(
            f"{PARTS * BATCHES * BATCH:,} images of {' x '.join(map(str, SHAPE))} in {PARTS} "
            f"parts, from a source that waits {waiting:g} s in all; folded, 100 components. The "
            "model: the time until the processes are there, the waiting divided by their number, "
            "and everything else as in one process that does not wait "
            f"({computing:.1f} s). Singular values differ by at most {away:.0e}, relatively."
        ),
        tables=[checked(measured, predicted, starting), *forecast(rates)],
        goals=[
            Goal(
                "fit of shards, waiting source: 4 processes over 1",
                measured[1] / measured[4],
                f"{measured[1] / measured[4]:.2f} times",
                3.5,
                at_least=True,
                unit=" times",
            ),
            Goal(
                "fit of shards: the model of its time, largest error",
                100 * max(abs(predicted[each] / measured[each] - 1) for each in PROCESSES),
                f"{100 * max(abs(predicted[c] / measured[c] - 1) for c in PROCESSES):.0f} %",
                20,
                unit=" %",
            ),
        ],
        numbers=numbers,
    )


def checked(
    measured: dict[int, float], predicted: dict[int, float], starting: dict[int, float]
) -> Table:
    rows = [
        [
            str(count),
            f"{starting[count] * (count > 1):.1f} s",
            f"{predicted[count]:.1f} s",
            f"{measured[count]:.1f} s",
            f"{predicted[count] / measured[count]:.2f}",
            f"{measured[1] / measured[count]:.2f}",
        ]
        for count in PROCESSES
    ]
    columns = [
        "processes",
        "until they are there",
        "predicted",
        "measured",
        "ratio",
        "times faster",
    ]
    return Table("Predicted and measured", columns, rows)


def measured_rates() -> dict[str, float]:
    """Of one core, by its processor time: the best of five tries."""
    generator = torch.Generator().manual_seed(0)
    flat = torch.randn(256, MEASURED, generator=generator)
    moments = Moments(MEASURED).update(flat)
    images = torch.rand(16, *LARGE, generator=generator)
    cosines = CoefficientMoments(LARGE).update(images)
    other = pickle.loads(pickle.dumps(moments))
    file = io.BytesIO()
    noise = (torch.rand(375, 500, 3, generator=generator) * 60 + 90).byte()
    Image.fromarray(noise.numpy()).resize((125, 94)).resize((500, 375)).save(file, "JPEG")
    size = PictureSize(224, shorter_side=256)
    sent = len(pickle.dumps(moments))

    def best(work: Callable[[], object]) -> float:
        found = []
        for _ in range(5):
            begun = time.process_time()
            work()
            found.append(time.process_time() - begun)
        return min(found)

    return {
        "multiply-adds a second in moments": 256
        * MEASURED**2
        / 2
        / best(lambda: moments.update(flat)),
        "seconds an image in cosines": best(lambda: cosines.update(images)) / len(images),
        "bytes a second packed and unpacked": sent
        / best(lambda: pickle.loads(pickle.dumps(moments))),
        "bytes a second merged": 8 * MEASURED**2 / best(lambda: moments.merge(other)),
        "seconds a photograph is decoded": best(
            lambda: picture_pixels(open_picture(file.getvalue()), size)
        ),
        "n^3 a second decomposed": 1000**3 / best(lambda: torch.linalg.eigh(_symmetric(1000))),
    }


def _symmetric(size: int) -> Tensor:
    matrix = torch.randn(size, size, generator=torch.Generator().manual_seed(0)).double()
    return matrix + matrix.T


def forecast(rates: dict[str, float]) -> list[Table]:
    """A thousand workers, a billion images."""
    columns = {
        "p = 16,384, `exact`": _forecast(rates, "exact", Problem(LONG, LONG, False, 2000, IMAGES)),
        "3 x 224 x 224, `dct`": _forecast(rates, "dct", Problem(LARGE, LARGE, True, None, IMAGES)),
    }
    names = next(iter(columns.values()))
    rows = [[name, *(column[name] for column in columns.values())] for name in names]
    title = f"Predicted for {WORKERS:,} workers of one core and {IMAGES:,} images"
    return [
        Table("Rates of this machine", ["what", ""], [[k, f"{v:.3g}"] for k, v in rates.items()]),
        Table(title, ["", *columns], rows),
    ]


def _forecast(rates: dict[str, float], route: str, problem: Problem) -> dict[str, str]:
    cost: RouteCost = route_cost(route, problem)
    size = problem.filtered
    if route == "exact":
        reading = SMALL_IMAGE / STORAGE
        summing = size**2 / 2 / rates["multiply-adds a second in moments"]
        sent = cost.summed / 2
    else:
        reading = PHOTOGRAPH / STORAGE + rates["seconds a photograph is decoded"]
        summing = rates["seconds an image in cosines"]
        sent = cost.summed
    tasks, memory = Parallelism(10 * WORKERS, WORKERS, "").tasks(cost), cost.merging
    moving = sent / LINK + sent / rates["bytes a second packed and unpacked"]
    merging = cost.summed / rates["bytes a second merged"]
    rounds = math.ceil(math.log2(WORKERS))
    decomposing = 2 * size**3 / rates["n^3 a second decomposed"] if route == "exact" else 1.0
    return {
        "read and decode an image": f"{1e3 * reading:.2f} ms",
        "sum up its moments": f"{1e3 * summing:.2f} ms",
        "all images of a worker": _words(IMAGES / WORKERS * (reading + summing)),
        "a result": f"{sent / 1e6:,.1f} MB",
        "engine: results, all into one process": f"{tasks:,}, {tasks * sent / 1e9:,.0f} GB",
        "engine: to receive and merge them": _words(tasks * (moving + merging)),
        "engine: memory of that process": f"{memory / 1e9:,.1f} GB",
        "ranks: rounds": str(rounds),
        "ranks: traffic in all": f"{(WORKERS - 1) * sent / 1e9:,.0f} GB",
        "ranks: to send and merge": _words(rounds * (moving + merging)),
        "to decompose, twice": _words(decomposing),
    }


def _words(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=320.0, help="of waiting, in all")
    measuring.command("sharded-fit", run, parser)


if __name__ == "__main__":
    main()
