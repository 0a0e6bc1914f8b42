"""The public names of ttapca, by purpose: `__init__.py` imports each when it is first used."""

# ruff: noqa: I001 - grouped, not sorted

# Fit a filter and keep it
from ttapca.fitting.fit import fit as fit
from ttapca.fitting.fitted_filter import FittedFilter as FittedFilter
from ttapca.fitting.fitted_filter import load as load
from ttapca.fitting.attachment import Attachment as Attachment
from ttapca.fitting.attachment import attach as attach

# Adapt a model
from ttapca.methods.adapt import adapt as adapt
from ttapca.adaptation.adapter import Adapter as Adapter
from ttapca.adaptation.adapter import detach as detach
from ttapca.adaptation.named_streams import NamedStream as NamedStream
from ttapca.adaptation.guards import CollapseGuard as CollapseGuard

# Choose or write a method
from ttapca.methods import METHODS as METHODS
from ttapca.methods import Method as Method
from ttapca.methods import MethodName as MethodName
from ttapca.methods import Mixture as Mixture
from ttapca.adaptation.surfaces import Surface as Surface
from ttapca.adaptation.surfaces import BatchNormStatistics as BatchNormStatistics
from ttapca.adaptation.surfaces import SpectralGains as SpectralGains

# See what it does and what it costs
from ttapca.adaptation.explanation import Cost as Cost
from ttapca.adaptation.explanation import measure_cost as measure_cost
from ttapca.adaptation.explanation import Explanation as Explanation
from ttapca.adaptation.explanation import explain as explain
from ttapca.adaptation.health import Health as Health
from ttapca.adaptation.shift_alarm import ShiftAlarm as ShiftAlarm

# The mathematics alone
from ttapca.spectral.filter import SpectralFilter as SpectralFilter
from ttapca.spectral.pca import PCA as PCA
from ttapca.spectral.pca import Moments as Moments

# Errors and warnings
from ttapca.errors import TtapcaError as TtapcaError
from ttapca.errors import TtapcaWarning as TtapcaWarning

__version__: str
