"""Types of `ttapca.methods`; written by scripts/write_methods.py."""

from typing import Literal

from ttapca.methods.baselines import BN as BN
from ttapca.methods.baselines import Source as Source
from ttapca.methods.baselines import Tent as Tent
from ttapca.methods.cotta import CoTTA as CoTTA
from ttapca.methods.deyo import DeYO as DeYO
from ttapca.methods.eata import EATA as EATA
from ttapca.methods.eata import RDumb as RDumb
from ttapca.methods.lame import LAME as LAME
from ttapca.methods.memo import MEMO as MEMO
from ttapca.methods.method import METHODS as METHODS
from ttapca.methods.method import Method as Method
from ttapca.methods.method import Mixture as Mixture
from ttapca.methods.neo import NEO as NEO
from ttapca.methods.neo import FOAShift as FOAShift
from ttapca.methods.pea import PEA as PEA
from ttapca.methods.per_image_norms import IABN as IABN
from ttapca.methods.per_image_norms import UnMixTNS as UnMixTNS
from ttapca.methods.roid import ROID as ROID
from ttapca.methods.rotta import RoTTA as RoTTA
from ttapca.methods.sar import SAR as SAR
from ttapca.methods.shot import SHOT as SHOT
from ttapca.methods.slr import SLR as SLR
from ttapca.methods.t3a import T3A as T3A
from ttapca.methods.ttapca import TTAPCA as TTAPCA
from ttapca.methods.ttt import TTT as TTT
from ttapca.methods.wiener import PulledWiener as PulledWiener
from ttapca.methods.wiener import Wiener as Wiener

MethodName = Literal[
    "source",
    "bn",
    "shot",
    "ttt",
    "tent",
    "slr+it",
    "t3a",
    "cotta",
    "eata",
    "lame",
    "memo",
    "iabn",
    "sar",
    "rdumb",
    "rotta",
    "deyo",
    "foa-shift",
    "unmix-tns",
    "roid",
    "come",
    "neo",
    "pea",
    "ttapca",
    "ttapca-relu",
    "ttapca-exp",
    "ttapca-multiplicative",
    "wiener",
    "match",
    "two-sided",
    "ttapca-closed",
]
