"""How many source predictions a truncated filter keeps, and who is told when it keeps few."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import ttapca
from fitting.parted import rewrite
from oracles import images, left_untouched
from ttapca.errors import TruncationWarning

DATA = images(150)
PROBE = DATA[:8]


def with_outputs(count: int) -> nn.Module:
    """Convolution, BatchNorm, and a last layer of so many logits."""
    generator = torch.Generator().manual_seed(0)
    layers = (nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten())
    model = nn.Sequential(*layers, nn.Linear(4 * 36, count)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model.eval()


def test_fit_measures_what_dropping_does_to_source_predictions(tmp_path: Path) -> None:
    model = with_outputs(10)
    fitted = ttapca.fit(model, "0", DATA, 3)
    attachment = ttapca.attach(model, fitted)
    with torch.no_grad():
        filtered = model(DATA).argmax(1)
        attachment.detach()
        same = (filtered == model(DATA).argmax(1)).double()
    assert fitted.agreement_ == pytest.approx(float(same[:16].mean()))  # the part that is kept
    explained = float(fitted.explained_variance_ratio_.sum())
    assert fitted.dropped_variance_ == pytest.approx(1 - explained)
    fitted.save(tmp_path / "f")
    loaded = ttapca.load(tmp_path / "f")
    assert loaded.agreement_ == fitted.agreement_
    assert loaded.truncated(3).agreement_ == fitted.agreement_
    assert loaded.truncated(2).agreement_ is None


def test_parts_are_kept_evenly_over_the_data() -> None:
    """So that data in order of class do not count as one class."""
    model = with_outputs(10)
    seen: list[float] = []
    model[0].register_forward_pre_hook(lambda _, args: seen.append(float(args[0][0, 0, 0, 0])))
    numbers = torch.arange(40.0).double()
    batches = [images(20) + number for number in numbers]
    ttapca.fit(model, "0", batches, 3)
    compared = seen[81:]  # after the probe, one pass, and the whole network for its statistics
    # Without and with the filter; then each as it is and mirrored.
    parts, left_over = divmod(len(compared), 4)
    assert left_over == 0
    assert 5 <= parts <= 8
    plain = compared[:parts]
    assert plain == compared[parts : 2 * parts] == compared[2 * parts :: 2]
    first = float(images(20)[0, 0, 0, 0])
    assert max(compared) - first >= 30


def test_a_complete_basis_drops_nothing() -> None:
    fitted = ttapca.fit(with_outputs(10), "0", DATA)
    assert fitted.dropped_variance_ < 1e-9
    assert fitted.agreement_ is None
    assert not fitted.drops_too_much
    assert fitted.loss_in_words() == "drops 0.00 % of the source variance"


def test_models_without_classes_have_no_agreement_and_the_variance_decides() -> None:
    model = with_outputs(1)
    assert ttapca.fit(model, "0", DATA, 3).agreement_ is None
    fitted = ttapca.fit(model, "0", DATA)
    assert not fitted.truncated(fitted.n_components_).drops_too_much
    assert fitted.truncated(3).drops_too_much


def test_a_filter_of_before_loads(tmp_path: Path) -> None:
    ttapca.fit(with_outputs(10), "0", DATA, 3).save(tmp_path / "f")
    old = rewrite(tmp_path / "f", lambda config, _: config["source"].pop("agreement"))
    assert ttapca.load(old).agreement_ is None


@pytest.mark.filterwarnings("error::ttapca.errors.TruncationWarning")
def test_learned_gains_over_a_truncated_filter_are_warned_of() -> None:
    model = with_outputs(10)
    little = ttapca.fit(model, "0", DATA, 3)
    assert little.drops_too_much
    said = r"3 components at `0` drops .* and changes .* `wiener`"
    for method in ("ttapca-relu", "ttapca-exp", "ttapca-multiplicative", "tent"):
        with left_untouched(model, PROBE), pytest.warns(TruncationWarning, match=said) as found:
            ttapca.adapt(model, method, filter=little).detach()  # type: ignore[arg-type]
        assert found[0].filename == __file__  # it points at the call of `adapt`
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for method in ("wiener", "ttapca-closed"):
            ttapca.adapt(model, method, filter=little).detach()  # type: ignore[arg-type]
        ttapca.adapt(model, "ttapca-relu", filter=ttapca.fit(model, "0", DATA)).detach()
