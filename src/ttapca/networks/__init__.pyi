"""The public names of `ttapca.networks`, each imported when it is first used."""

from ttapca.networks.architectures import ARCHITECTURES as ARCHITECTURES
from ttapca.networks.architectures import build as build
from ttapca.networks.checkpoints import load as load
from ttapca.networks.checkpoints import load_rotation as load_rotation
from ttapca.networks.checkpoints import load_weights as load_weights
from ttapca.networks.checkpoints import packaged as packaged
from ttapca.networks.checkpoints import packaged_filters as packaged_filters
from ttapca.networks.evaluation import Evaluation as Evaluation
from ttapca.networks.evaluation import evaluate as evaluate
from ttapca.networks.evaluation import expected_calibration_error as expected_calibration_error
from ttapca.networks.evaluation import mean_iou as mean_iou
from ttapca.networks.layer_costs import LayerFacts as LayerFacts
from ttapca.networks.layer_costs import LayerTable as LayerTable
from ttapca.networks.layer_costs import describe_layers as describe_layers
from ttapca.networks.network import NORMALISATIONS as NORMALISATIONS
from ttapca.networks.network import ImageNetwork as ImageNetwork
from ttapca.networks.network import Normalisation as Normalisation
from ttapca.networks.network import normalisation_of as normalisation_of
from ttapca.networks.rotation import RotationHead as RotationHead
from ttapca.networks.rotation import RotationNetwork as RotationNetwork
from ttapca.networks.rotation import add_rotation_head as add_rotation_head
from ttapca.networks.rotation import turn as turn
from ttapca.networks.runs import train as train
from ttapca.networks.training import EpochRecord as EpochRecord
from ttapca.networks.training import Training as Training
from ttapca.networks.training import TrainingOptions as TrainingOptions
