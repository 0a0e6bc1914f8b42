"""Routes that need the samples themselves, so that one process reads all of them.

- **gram**, for few samples: exact, one samples x samples matrix; the only route that keeps all
  activations in memory;
- **randomised**, for many samples of a long layer: a few passes over the data, until an error bound
  is met.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ttapca.fitting.fit_task import FitTask
from ttapca.fitting.fitted_filter import FittedFilter
from ttapca.spectral.affine import LinearPart
from ttapca.spectral.basis import Basis, Dense, Folded
from ttapca.spectral.calibration import Calibration, calibrate, energies_of, rest_of
from ttapca.spectral.few_inputs import InputGram
from ttapca.spectral.pca import PCA, SampleGram, hold
from ttapca.spectral.randomised import randomised_pca


def by_gram(task: FitTask) -> FittedFilter:
    """Decompose few samples; where they turn out to be many, take the other route."""
    at_input = task.shapes.folds
    size = math.prod(task.shape(at_input=at_input))
    batches = task.read(at_input=at_input)
    held, complete = hold(batches, limited=not task.on_demand)
    if not complete:
        if not at_input:  # at the input, what was read is of no use to the randomised route
            task.give_back(held, batches)
        return randomised(task)
    task.source.stage("decomposing")
    if at_input:
        return _gram_at_input(task, held)
    gram = SampleGram(held, size, device=task.source.device)
    pca, sample = gram.pca(task.n_components), task.collected.sample
    task.source.stage("calibrating")
    calibration = calibrate(sample, pca, lambda _, out: gram.pca(leave_out=out), _dense)
    return task.fitted("gram", Dense(pca.basis.cpu()), pca, calibration)


def _gram_at_input(task: FitTask, held: list[Tensor]) -> FittedFilter:
    gram = InputGram(held, LinearPart(task.source.layer, task.shape(at_input=True)))
    pca, sample = gram.pca(task.n_components), task.collected.sample
    task.source.stage("calibrating")
    calibration = calibrate(
        sample,
        pca,
        lambda _, out: gram.pca(leave_out=out),
        lambda found: Folded(found.project, found.rebuild),
    )
    basis = Folded(pca.project, pca.rebuild)
    return task.with_images(task.fitted("gram", basis, pca, calibration), calibration)


def randomised(task: FitTask) -> FittedFilter:
    """Read the data several times, until an error bound is met."""
    task.source.require_several_passes()
    pca = randomised_pca(
        task.read,
        math.prod(task.shapes.output),
        task.n_components,
        generator=task.generator,
        device=task.source.device,
    )
    task.source.stage("calibrating")
    samples = task.collected.sample.all()
    variances = pca.explained_variance
    energies = energies_of(
        samples, pca.mean, variances, lambda centred: centred @ pca.basis, pca.n_samples
    )
    rest = rest_of(samples, pca.mean, _dense(pca)) if pca.drops_something else None
    calibration = Calibration(energies, torch.arange(len(samples)), rest)
    basis = Dense(pca.basis.cpu())
    return task.fitted("randomised", basis, pca, calibration, error_bound=pca.error_bound.cpu())


def _dense(pca: PCA) -> Basis:
    return Dense(pca.basis)
