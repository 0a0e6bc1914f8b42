"""The public names of `ttapca.benchmark`, each imported when it is first used."""

from ttapca.benchmark.comparisons import frame as frame
from ttapca.benchmark.filters import recommended_layer as recommended_layer
from ttapca.benchmark.plan import Plan as Plan
from ttapca.benchmark.plan import Unit as Unit
from ttapca.benchmark.plan import expand as expand
from ttapca.benchmark.plan import presets as presets
from ttapca.benchmark.plan import read_plan as read_plan
from ttapca.benchmark.plan import read_preset as read_preset
from ttapca.benchmark.results import Results as Results
from ttapca.benchmark.rows import Cell as Cell
from ttapca.benchmark.rows import Observation as Observation
from ttapca.benchmark.rows import Outcome as Outcome
from ttapca.benchmark.rows import Row as Row
from ttapca.benchmark.rows import Setting as Setting
from ttapca.benchmark.running import run as run
from ttapca.benchmark.search import Choices as Choices
from ttapca.benchmark.search import Range as Range
from ttapca.benchmark.search import Search as Search
from ttapca.benchmark.search import SearchSpace as SearchSpace
from ttapca.benchmark.session import Benchmark as Benchmark
from ttapca.benchmark.subject import ImageSource as ImageSource
from ttapca.benchmark.subject import Subject as Subject
from ttapca.benchmark.tuning import Trial as Trial
from ttapca.benchmark.tuning import Tuned as Tuned
from ttapca.benchmark.tuning import Tuning as Tuning
from ttapca.networks.source import NetworkSource as NetworkSource
