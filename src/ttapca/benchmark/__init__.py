"""Compare methods by a plan, and keep the numbers in one file.

    plan = Plan("digits", "digits", methods=("bn", "tent"), corruptions=("fog", "frost"))
    rows = Benchmark(plan).run("results.sqlite")

A `Benchmark` loads network and images, fits the filter, and makes the measurements of a `Plan` that
are not in the file yet. If you have network, images and filter already, put them into a `Subject`:
`expand` gives the units of work, and `run` runs them. A `Row` is one measurement: its `Cell` is the
question, its `Outcome` the answer. A `Tuning` chooses the options of a method.
"""

from ttapca.support.lazy import lazy_names

__all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
