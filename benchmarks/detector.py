"""How well a shift is noticed: band energies beside two-sample tests on softmax and features.

All tests know the same 2,048 test images of CIFAR-10, which the network has not learned by heart;
other test images are corrupted in nineteen ways at five severities. Needs CIFAR-10 and the
photographs of frost in `--data` (`ttapca data get cifar10`); a quarter of an hour on one thread. An
interrupted run goes on where it stopped.

    python benchmarks/detector.py [--images 400] [--batches 40] [--data ~/.cache/ttapca]
"""

from __future__ import annotations

import argparse
import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when numpy is imported

import numpy as np
import torch
from torch import Tensor

import measuring
import ttapca
from measuring import Goal, Progress, Result, Spread, Table
from shift_tests import BandEnergies, KolmogorovSmirnov, Seen, ShiftTest, all_tests
from ttapca import datasets, networks
from ttapca.corruptions import CORRUPTIONS, SEVERITIES, corrupt
from ttapca.spectral.cross_validation import energies_of

NETWORK = "cifar10-resnet20"
SOURCE_IMAGES = 2048
FIT_IMAGES = 20_000
SIZES = (1, 4, 16, 64, 200)
FALSE_ALARMS = 0.01
CLEAN_BATCHES = 1000
JUDGED_BATCHES = 100  # whose p-values are computed, some of which are slow
TIMED = 20

# Of the stream that shifts and comes back: clean, corrupted and clean images.
ALARM_SEVERITY = 3
ALARM_BATCH = 16
ALARM_IMAGES = 400

Scores = dict[str, dict[str, list[float]]]  # by test and batch size


class Images:
    """CIFAR-10 as the network and the filter see it."""

    def __init__(self, root: Path) -> None:
        self.textures = root / datasets.FROST
        self.network = networks.load(NETWORK).eval()
        train = datasets.load("cifar10", "train", root=root)
        # The first images are for the filter; what a network learned by heart lies behind them.
        batches = datasets.TensorBatches(train[:FIT_IMAGES], 250)
        self.fitted = ttapca.fit(self.network, "conv1", batches)
        self._basis = self.fitted.basis.prepared(torch.float32)
        self._mean = self.fitted.center_.float()
        self._variances = self.fitted.explained_variance_.float()
        test = datasets.load("cifar10", "test", root=root)
        self.source, self.unseen = test[:SOURCE_IMAGES], test[SOURCE_IMAGES:]
        self.learned = train[FIT_IMAGES : FIT_IMAGES + SOURCE_IMAGES]

    @torch.no_grad()
    def seen(self, pixels: Any) -> Seen:
        """Look at images."""
        fitted, kept = self.fitted, {}
        layers = dict(self.network.named_modules())
        last = [name for name, layer in layers.items() if isinstance(layer, torch.nn.Linear)][-1]
        handles = [
            layers[name].register_forward_pre_hook(
                lambda _, inputs, name=name: kept.update({name: inputs[0]})
            )
            for name in (fitted.layer, last)
        ]
        found: list[tuple[Tensor, Tensor, Tensor]] = []
        for part in datasets.to_tensor(np.ascontiguousarray(pixels)).split(200):
            softmax = self.network(part).softmax(1)
            found.append((self.energies(kept[fitted.layer]), softmax, kept[last]))
        for handle in handles:
            handle.remove()
        parts = (torch.cat(each).double().numpy() for each in zip(*found, strict=True))
        return Seen(*parts)

    def energies(self, inputs: Tensor) -> Tensor:
        """Band energies of what the filter's layer is given."""
        return energies_of(inputs.flatten(1), self._mean, self._variances, self._basis.project)


def drawn(seen: Seen, size: int, count: int, key: str) -> Iterator[Seen]:
    """Batches of some of the images; without repetition within a batch."""
    generator = np.random.default_rng(zlib.crc32(f"{key} {size}".encode()))
    for _ in range(count):
        yield seen[generator.choice(len(seen), size, replace=False)]


def one_class(seen: Seen, labels: Any, size: int, count: int) -> Iterator[Seen]:
    """Batches of images of one class, the classes in turn."""
    generator = np.random.default_rng(size)
    for number in range(count):
        (members,) = np.nonzero(labels == number % (labels.max() + 1))
        yield seen[generator.choice(members, size, replace=False)]


def scores(tests: list[ShiftTest], batches: Callable[[int], Iterator[Seen]]) -> Scores:
    """Scores by test and size of a batch."""
    found: Scores = {test.name: {str(size): [] for size in SIZES} for test in tests}
    for size in SIZES:
        for batch in batches(size):
            for test in tests:
                found[test.name][str(size)].append(float(f"{test.score(batch):.6g}"))
    return found


def alarms(tests: list[ShiftTest], batches: Callable[[int], Iterator[Seen]]) -> dict[str, Any]:
    """Shares of batches whose p-value is under 1 %, in percent, by test and size of a batch."""
    found: dict[str, Any] = {test.name: {} for test in tests}
    for size in SIZES:
        chosen = list(batches(size))
        for test in tests:
            low = [test.p_value(batch) < FALSE_ALARMS for batch in chosen]
            found[test.name][str(size)] = 100 * sum(low) / len(low)
    return found


def auroc(shifted: list[float], clean: list[float]) -> float:
    """How often a shifted batch has a higher score than a clean one, ties counting half."""
    rising = np.sort(clean)
    below = np.searchsorted(rising, shifted, side="left")
    upto = np.searchsorted(rising, shifted, side="right")
    return float((below + upto).mean() / 2 / len(clean))


def power(shifted: list[float], clean: list[float]) -> float:
    """The share of shifted batches beyond the score that 1 % of clean batches exceed."""
    return float((np.array(shifted) > np.quantile(clean, 1 - FALSE_ALARMS)).mean())


def milliseconds(
    tests: list[ShiftTest], images: Images, clean: Seen, pixels: Any
) -> dict[str, Any]:
    """Time of a p-value beyond the network's own pass, by test and size of a batch."""
    found: dict[str, Any] = {test.name: {} for test in tests}
    for size in SIZES:
        inputs = datasets.to_tensor(np.ascontiguousarray(pixels[:size]))
        for test in tests:

            def judge(
                test: ShiftTest = test, batch: Seen = clean[:size], inputs: Tensor = inputs
            ) -> None:
                if isinstance(test, BandEnergies):
                    images.energies(inputs)
                test.p_value(batch)

            judge()
            seconds = [measuring.timed(judge)[0] for _ in range(TIMED)]
            found[test.name][str(size)] = 1000 * Spread.of(seconds).median
    return found


def clean_alarms(images: Images, order: str, size: int, forgetting: Any) -> int:
    """How often `on_shift` says that a shift begins in a clean stream."""
    labels = images.unseen.labels
    places = np.random.default_rng(0).permutation(len(labels))
    if order == "sorted":
        places = places[np.argsort(labels[places], kind="stable")]
    pixels = datasets.to_tensor(np.ascontiguousarray(images.unseen.images[places]))
    said: list[ttapca.Health] = []
    options = {"filter": images.fitted, "forgetting": forgetting, "on_shift": said.append}
    with ttapca.adapt(images.network, "wiener", **options) as adapted:
        for batch in pixels.split(size):
            adapted(batch)
    return sum(bool(health.shifted) for health in said)


def alarm_delays(images: Images, corruption: str) -> tuple[int | None, int | None]:
    """After how many images `on_shift` says that a shift began, and that it ended."""
    clean = np.ascontiguousarray(images.unseen.images[: 3 * ALARM_IMAGES])
    middle = clean[ALARM_IMAGES : 2 * ALARM_IMAGES]
    spoilt = corrupt(middle, corruption, ALARM_SEVERITY, textures=images.textures)
    stream = np.concatenate([clean[:ALARM_IMAGES], spoilt, clean[2 * ALARM_IMAGES :]])
    said: list[ttapca.Health] = []
    options = {"filter": images.fitted, "forgetting": "online", "on_shift": said.append}
    with ttapca.adapt(images.network, "wiener", **options) as adapted:
        for batch in datasets.to_tensor(stream).split(ALARM_BATCH):
            adapted(batch)
    begun = [health.images - ALARM_IMAGES for health in said if health.shifted]
    ended = [health.images - 2 * ALARM_IMAGES for health in said if not health.shifted]
    return (begun[0] if begun else None), (ended[0] if ended else None)


def run(options: argparse.Namespace) -> Result:
    images = Images(options.data.expanduser())
    progress = Progress(options.to / "detector.progress")
    tests = all_tests(images.seen(images.source.images))
    check_distance(tests, images.seen(images.unseen.images[:64]))
    # Corrupted images and clean ones are not the same images.
    subjects = np.ascontiguousarray(images.unseen.images[: options.images])
    rest = images.unseen[options.images :]
    clean = images.seen(rest.images)

    def shuffled(size: int, count: int = CLEAN_BATCHES) -> Iterator[Seen]:
        return drawn(clean, size, count, "clean")

    def ordered(size: int, count: int = CLEAN_BATCHES) -> Iterator[Seen]:
        return one_class(clean, rest.labels, size, count)

    found = {
        "clean": progress.once("clean", lambda: scores(tests, shuffled)),
        "sorted": progress.once("sorted", lambda: scores(tests, ordered)),
    }
    for corruption in CORRUPTIONS:
        for severity in SEVERITIES:

            def measure(corruption: str = corruption, severity: int = severity) -> Scores:
                spoilt = corrupt(subjects, corruption, severity, textures=images.textures)
                seen, key = images.seen(spoilt), f"{corruption} {severity}"
                return scores(tests, lambda size: drawn(seen, size, options.batches, key))

            found[f"{corruption} {severity}"] = progress.once(f"{corruption} {severity}", measure)
    said = {
        "shuffled": progress.once(
            "p of shuffled", lambda: alarms(tests, lambda n: shuffled(n, JUDGED_BATCHES))
        ),
        "sorted": progress.once(
            "p of sorted", lambda: alarms(tests, lambda n: ordered(n, JUDGED_BATCHES))
        ),
        "learned": progress.once(
            "p by learned images",
            lambda: alarms(
                all_tests(images.seen(images.learned.images)), lambda n: shuffled(n, JUDGED_BATCHES)
            ),
        ),
    }
    times = progress.once(
        "milliseconds", lambda: milliseconds(tests, images, clean, rest.images[: max(SIZES)])
    )
    streams = {
        f"{order}, {forgetting}, batches of {size}": progress.once(
            f"alarms {order} {forgetting} {size}",
            lambda order=order, size=size, forgetting=forgetting: clean_alarms(
                images, order, size, forgetting
            ),
        )
        for order in ("shuffled", "sorted")
        for forgetting, size in (("online", 16), ("online", 200), ("episodic", 16))
    }
    delays = {
        name: progress.once(f"delay {name}", lambda name=name: list(alarm_delays(images, name)))
        for name in CORRUPTIONS
    }
    progress.forget()
    return result(found, said, times, streams, delays, options, len(images.unseen.labels))


def check_distance(tests: list[ShiftTest], batch: Seen) -> None:
    """Our quick Kolmogorov-Smirnov distance is scipy's."""
    from scipy import stats

    for test in tests:
        if isinstance(test, KolmogorovSmirnov):
            source, mine = test._source, test._columns(batch)
            theirs = [
                stats.ks_2samp(*pair).statistic for pair in zip(mine.T, source.T, strict=True)
            ]
            if abs(test.score(batch) - max(theirs)) > 1e-9:
                raise AssertionError(f"{test.name}: {test.score(batch)}, scipy {max(theirs)}")


def by_size(title: str, cells: Callable[[str, int], str], tests: list[str]) -> Table:
    """A table with a row for every test and a column for every size of a batch."""
    rows = [[test, *(cells(test, size) for size in SIZES)] for test in tests]
    return Table(title, ["test", *(f"batch of {size}" for size in SIZES)], rows)


def result(
    found: dict[str, Scores],
    said: dict[str, Any],
    times: dict[str, Any],
    streams: dict[str, int],
    delays: dict[str, list[int | None]],
    options: argparse.Namespace,
    unseen: int,
) -> Result:
    """Tables of all that was measured."""
    clean, names = found["clean"], list(found["clean"])
    shifts = [f"{name} {severity}" for name in CORRUPTIONS for severity in SEVERITIES]
    aurocs = {key: per(found[key], clean, auroc) for key in shifts}
    powers = {key: per(found[key], clean, power) for key in shifts}

    def mean(table: dict[str, Any], keys: list[str], test: str, size: int) -> float:
        return float(np.mean([table[key][test][str(size)] for key in keys]))

    def both_powers(test: str, severity: int) -> str:
        keys = [key for key in shifts if key.endswith(f" {severity}")]
        return " / ".join(f"{100 * mean(powers, keys, test, size):.1f}" for size in (16, 200))

    def sorted_alarms(test: str, size: int) -> float:
        limit = np.quantile(clean[test][str(size)], 1 - FALSE_ALARMS)
        return float(100 * (np.array(found["sorted"][test][str(size)]) > limit).mean())

    tables = [
        by_size(
            "AUROC, clean against shifted batches, mean over 19 corruptions and 5 severities",
            lambda test, size: f"{mean(aurocs, shifts, test, size):.3f}",
            names,
        ),
        by_size(
            "Power in percent at 1 % false alarms on shuffled clean batches",
            lambda test, size: f"{100 * mean(powers, shifts, test, size):.1f}",
            names,
        ),
        Table(
            "The same by severity, batches of 16 / 200",
            ["test", *(f"severity {severity}" for severity in SEVERITIES)],
            [[test, *(both_powers(test, severity) for severity in SEVERITIES)] for test in names],
        ),
        by_size(
            "False alarms in percent on clean batches of one class, with the same limits",
            lambda test, size: f"{sorted_alarms(test, size):.1f}",
            names,
        ),
        by_size(
            "Clean batches with p < 0.01, in percent: shuffled / of one class / shuffled, with "
            "source images that the network was trained on",
            lambda test, size: " / ".join(
                f"{said[kind][test][str(size)]:.0f}" for kind in ("shuffled", "sorted", "learned")
            ),
            names,
        ),
        by_size(
            "Milliseconds for a p-value of a batch, beyond the network's own pass",
            lambda test, size: f"{times[test][str(size)]:.2f}",
            names,
        ),
        Table(
            f"`on_shift`: false alarms in a clean stream of {unseen:,} images, `wiener`",
            ["stream", "false alarms"],
            [[stream, str(count)] for stream, count in streams.items()],
        ),
        Table(
            f"`on_shift`: images until a shift of severity {ALARM_SEVERITY} is told, and until its "
            f"end is; batches of {ALARM_BATCH}, {ALARM_IMAGES} clean, shifted and clean images",
            ["corruption", "begins after", "ends after"],
            [
                [name, *("never" if n is None else str(n) for n in both)]
                for name, both in delays.items()
            ],
        ),
    ]
    false = sum(count for stream, count in streams.items() if stream.startswith("sorted"))
    return Result(
        title="Noticing a shift",
        text=(
            f"`{NETWORK}`, filter at `conv1` from {FIT_IMAGES:,} training images. Every test knows "
            f"the same {SOURCE_IMAGES:,} test images; {options.images} others are corrupted, and "
            f"{options.batches} batches of each size are drawn from them; {CLEAN_BATCHES:,} clean "
            "batches come from the rest. Limits for 1 % false alarms are those of each test on the "
            "clean batches. KS: Kolmogorov-Smirnov (Rabanser et al., 2019); MMD: maximum mean "
            "discrepancy (Gretton et al., 2012) with 100 permutations. Time of ours includes the "
            "projection on the components, which a filter needs anyway."
        ),
        tables=tables,
        goals=[Goal("`on_shift`: false alarms, clean and sorted by class", false, str(false), 0)],
        numbers={"auroc": aurocs, "power": powers, "p": said, "milliseconds": times},
    )


def per(
    shifted: Scores, clean: Scores, compare: Callable[[list[float], list[float]], float]
) -> dict[str, dict[str, float]]:
    """Compare the scores of every test and size."""
    return {
        test: {size: compare(values, clean[test][size]) for size, values in sizes.items()}
        for test, sizes in shifted.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=400, help="test images that are corrupted")
    parser.add_argument("--batches", type=int, default=40, help="of each size and corruption")
    parser.add_argument("--data", type=Path, default=Path("~/.cache/ttapca"), help="data folder")
    measuring.command("detector", run, parser)


if __name__ == "__main__":
    main()
