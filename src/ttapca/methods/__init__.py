"""Methods of the literature and of this library, one file per method.

A method is a typed, frozen dataclass (see `ttapca.methods.method`). What several methods share is
in `ttapca.adaptation`; what only one method needs is in its file.
"""

# Importing a method registers it, and tables list methods in this order, which is not sorted.
# ruff: noqa: I001
from ttapca.methods.baselines import BN, Source, Tent
from ttapca.methods.shot import SHOT
from ttapca.methods.slr import SLR
from ttapca.methods.eata import EATA
from ttapca.methods.roid import ROID
from ttapca.methods.lame import LAME
from ttapca.methods.sar import SAR
from ttapca.methods.memo import MEMO
from ttapca.methods.cotta import CoTTA
from ttapca.methods.rotta import RoTTA
from ttapca.methods.pea import PEA
from ttapca.methods.neo import NEO
from ttapca.methods.t3a import T3A
from ttapca.methods.ttt import TTT
from ttapca.methods.learned_gains import TTAPCA
from ttapca.methods.wiener import PulledWiener, Wiener
from ttapca.methods.method import METHODS, Method, Mixture

__all__ = [
    "BN",
    "EATA",
    "LAME",
    "MEMO",
    "METHODS",
    "NEO",
    "PEA",
    "ROID",
    "SAR",
    "SHOT",
    "SLR",
    "T3A",
    "TTAPCA",
    "TTT",
    "CoTTA",
    "Method",
    "Mixture",
    "PulledWiener",
    "RoTTA",
    "Source",
    "Tent",
    "Wiener",
]
