"""Networks to adapt: architectures, checkpoints, training, evaluation.

`build` makes an untrained network, `load` one with weights, `train` trains one in a folder that
survives a crash, `describe_layers` lists the layers for a filter and its costs. All networks take
images in [0, 1]: normalisation is their first layer.
"""

from ttapca.support.lazy import lazy_names

__all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
