from __future__ import annotations

import copy
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import ttapca
from oracles import (
    DensePCA,
    assert_same_picture,
    images,
    left_untouched,
    options_of,
    picture_of,
    plain_ttapca_loop,
    small_convnet,
)
from ttapca import Adapter, BatchNormStatistics, SpectralGains
from ttapca.adaptation.objectives import mean_entropy
from ttapca.adaptation.optimisation import GradientSteps, adam
from ttapca.errors import AttachError, LayerOutputError, OptionError
from ttapca.support.logits import softmax_entropy

DATA = images(150)
BATCHES = list(images(60, seed=8).split(12))
X = BATCHES[0]
FITTED = ttapca.fit(small_convnet(), "conv1", DATA, 20)


def adapted(method: str = "ttapca-relu", **options: object) -> Adapter:
    options = {"initial": 0.05, "lr": 0.05} | options
    return ttapca.adapt(small_convnet(), method, filter=FITTED, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("gain", ["relu", "exp"])
@pytest.mark.parametrize("episodic", [True, False], ids=["episodic", "online"])
@pytest.mark.parametrize("logits", ["before", "after"])
@pytest.mark.parametrize("steps", [1, 3])
def test_equals_a_plain_loop(gain: str, episodic: bool, logits: str, steps: int) -> None:
    model = small_convnet()
    with torch.no_grad():
        dense = DensePCA(model.conv1(DATA))
    spectrum = torch.from_numpy(dense.singular_values[:20] / dense.singular_values[0])

    def gains_of(gamma: Tensor) -> Tensor:
        if gain == "relu":
            return spectrum / (spectrum + torch.clamp(gamma, min=0))
        return 1 / (1 + torch.exp(gamma**2 - spectrum))

    expected = plain_ttapca_loop(
        model,
        dense,
        gains_of,
        0.05,
        20,
        BATCHES,
        episodic=episodic,
        steps=steps,
        lr=0.05,
        after=logits == "after",
    )
    adapter = adapted(
        f"ttapca-{gain}",
        forgetting="episodic" if episodic else "online",
        steps=steps,
        logits=logits,
    )
    for x, reference in zip(BATCHES, expected, strict=True):
        torch.testing.assert_close(adapter(x), reference, rtol=0, atol=1e-9)
    assert adapter.updates == steps * len(BATCHES)
    assert adapter.skipped == 0
    assert adapter.n_parameters == 20


def test_one_step_episodic_before_is_the_unadapted_filter() -> None:
    adapter = adapted(logits="before")
    frozen = adapted(logits="before")
    with torch.no_grad():
        assert torch.equal(adapter(X), frozen.model(X))
    assert not torch.equal(adapted(logits="after")(X), adapter(X))


def test_entropy_falls_under_its_own_steps() -> None:
    adapter = adapted("ttapca-multiplicative", forgetting="online", lr=0.01, steps=5)
    first = adapted("ttapca-multiplicative", logits="before", steps=1)(X)
    assert float(mean_entropy(adapter(X))) < float(mean_entropy(first))


def gains_of(adapter: Adapter) -> Tensor:
    (surface,) = (s for s in adapter.surfaces if isinstance(s, SpectralGains))
    return surface.filter.gains().detach().clone()


def test_episodic_forgets_at_each_batch_online_does_not() -> None:
    episodic, online = adapted(forgetting="episodic"), adapted(forgetting="online")
    first = episodic(X)
    assert torch.equal(online(X), first)
    episodic(BATCHES[1])
    online(BATCHES[1])
    assert torch.equal(episodic(X), first)
    assert not torch.equal(online(X), first)


@pytest.mark.parametrize(
    ("forgetting", "forgets"), [("episodic", True), ("online", True), ("continual", False)]
)
def test_a_new_condition(forgetting: str, forgets: bool) -> None:
    adapter = adapted(forgetting=forgetting)
    start = gains_of(adapter)
    adapter(X)
    assert not torch.equal(gains_of(adapter), start)
    adapter.start_condition()
    assert torch.equal(gains_of(adapter), start) == forgets
    adapter.reset()
    assert torch.equal(gains_of(adapter), start)


@given(
    numbers=st.lists(st.integers(0, 4), max_size=4), method=st.sampled_from(list(ttapca.METHODS))
)
@settings(deadline=None, max_examples=25)
def test_reset_restores_bit_for_bit(numbers: list[int], method: str) -> None:
    adapter = ttapca.adapt(
        small_convnet(), method, filter=FITTED, forgetting="online", lr=0.05, **options_of(method)
    )
    first = [adapter(x) for x in BATCHES]
    for number in numbers:
        adapter(BATCHES[number])
    adapter.reset()
    for x, expected in zip(BATCHES, first, strict=True):
        assert torch.equal(adapter(x), expected)
    adapter.detach()


@given(
    numbers=st.lists(st.integers(0, 4), max_size=3), method=st.sampled_from(list(ttapca.METHODS))
)
@settings(deadline=None, max_examples=25)
def test_detach_leaves_no_trace(numbers: list[int], method: str) -> None:
    model = small_convnet().train()
    model.bn2.eval()
    before = picture_of(model)
    adapter = ttapca.adapt(
        model, method, filter=FITTED, forgetting="online", lr=0.05, **options_of(method)
    )
    for number in numbers:
        adapter(BATCHES[number])
    assert adapter.detach() is model
    assert adapter.detach() is model
    assert_same_picture(before, picture_of(model))
    with pytest.raises(AttachError, match="was detached"):
        adapter(X)


@pytest.mark.parametrize("method", ttapca.METHODS)
def test_disabled_is_the_untouched_model(method: str) -> None:
    model = small_convnet()
    plain = model(X)
    adapter = ttapca.adapt(
        model, method, filter=FITTED, forgetting="online", lr=0.05, **options_of(method)
    )
    adapter(X)
    state = copy.deepcopy(adapter.state_dict())
    with adapter.disabled():
        assert torch.equal(adapter(X), plain)
        assert torch.equal(model(X), plain)
        with adapter.disabled():
            assert torch.equal(model(X), plain)
        assert torch.equal(model(X), plain)
    torch.testing.assert_close(dict(adapter.state_dict()), dict(state), rtol=0, atol=0)
    if method not in ("source", "lame"):  # these leave the model itself as it is
        assert not torch.equal(model(X), plain)


@pytest.mark.parametrize("method", ttapca.METHODS)
def test_the_model_keeps_its_keys_and_weights(method: str) -> None:
    model = small_convnet()
    before = picture_of(model)
    adapter = ttapca.adapt(
        model, method, filter=FITTED, forgetting="online", lr=0.05, **options_of(method)
    )
    for x in BATCHES:
        adapter(x)
    during = picture_of(model)
    for part in ("parameters", "buffers", "modules"):
        assert before[part] == during[part]
    for name, tensor in before["state"].items():
        assert torch.equal(tensor, during["state"][name])
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_frozen_parameters_are_no_obstacle() -> None:
    model = small_convnet().requires_grad_(False)
    adapter = ttapca.adapt(model, "ttapca-relu", filter=FITTED, lr=0.05, initial=0.05)
    assert torch.equal(adapter(X), adapted()(X))


# A loss or gradient that is not finite.


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_poisoned_batch_is_skipped_and_counted(bad: float) -> None:
    clean, adapter = adapted(forgetting="online"), adapted(forgetting="online")
    poisoned = X.clone()
    poisoned[3, 0, 0, 0] = bad
    expected = [clean(x) for x in BATCHES]
    outputs = []
    for x in BATCHES:
        outputs.append(adapter(x))
        adapter(poisoned)
    for output, reference in zip(outputs, expected, strict=True):
        assert torch.equal(output, reference)  # the optimiser's state is as it was, too
    assert adapter.skipped == len(BATCHES)
    assert adapter.updates == len(BATCHES)


def test_a_gradient_that_is_not_finite_is_skipped() -> None:
    def cliff(logits: Tensor) -> Tensor:
        # Finite, with a gradient that is not: the square root's at zero.
        return torch.sqrt(logits.sum() * 0)

    adapter = Adapter(
        small_convnet(), [SpectralGains(FITTED, "relu")], GradientSteps(cliff), forgetting="online"
    )
    before = gains_of(adapter)
    output = adapter(X)
    assert torch.isfinite(output).all()
    assert torch.equal(gains_of(adapter), before)
    assert (adapter.updates, adapter.skipped) == (0, 1)


# Callers and containers.


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("method", ttapca.METHODS)
def test_callers_without_gradients(mode, method: str) -> None:
    options = {"filter": FITTED, "episodic": False, "lr": 0.05} | options_of(method)
    expected = ttapca.adapt(small_convnet(), method, **options)
    adapter = ttapca.adapt(small_convnet(), method, **options)
    for x in BATCHES:
        reference = expected(x)
        with mode():
            inside = x.clone()
            output = adapter(inside)
            assert torch.equal(output, reference)
            assert torch.equal(inside, x)
        assert not output.requires_grad
    with mode():
        adapter.reset()
    assert torch.equal(adapter(X), ttapca.adapt(small_convnet(), method, **options)(X))


@pytest.mark.parametrize("method", ttapca.METHODS)
def test_copies_and_pickles_live_on(method: str) -> None:
    adapter = ttapca.adapt(
        small_convnet(), method, filter=FITTED, forgetting="online", lr=0.05, **options_of(method)
    )
    adapter(X)
    twins = [copy.deepcopy(adapter), pickle.loads(pickle.dumps(adapter))]
    plain = small_convnet()(X)
    expected = [adapter(x) for x in BATCHES]
    for twin in twins:
        for x, reference in zip(BATCHES, expected, strict=True):
            assert torch.equal(twin(x), reference)
        twin.reset()
        assert torch.equal(twin.detach()(X), plain)


@pytest.mark.parametrize("method", ttapca.METHODS)
def test_export_freezes_the_present_state(method: str) -> None:
    adapter = ttapca.adapt(
        small_convnet(), method, filter=FITTED, forgetting="online", lr=0.05, **options_of(method)
    )
    last = adapter(X)
    program = torch.export.export(adapter, (X,))
    with torch.no_grad():
        # Running the model itself moves what follows the stream in the forward pass.
        follows = method in ("wiener", "match", "two-sided", "ttapca-closed")
        expected = last if follows else adapter.model(X)
        torch.testing.assert_close(program.module()(X), expected)


def test_moving_and_casting_take_the_optimiser_along() -> None:
    adapter = adapted(forgetting="online")
    adapter(X)
    adapter.float()
    reference = adapted(forgetting="online")
    reference(X)
    for x in BATCHES:
        output = adapter(x.float())
        assert output.dtype == torch.float32
        torch.testing.assert_close(output.double(), reference(x), rtol=0, atol=1e-3)
    adapter.reset()
    adapter.to(torch.float32)
    assert torch.isfinite(adapter(X.float())).all()


def test_training_mode_is_no_switch() -> None:
    model = small_convnet()
    model.add_module("dropout", nn.Dropout(0.5))
    model.train()
    adapter = ttapca.adapt(model, "ttapca-relu", filter=FITTED)
    expected = adapter(X)
    assert torch.equal(adapter.train()(X), expected)
    assert torch.equal(adapter.eval()(X), expected)
    assert adapter.detach().training
    assert model.dropout.training


def test_the_random_state_and_the_input_are_left_alone() -> None:
    adapter = adapted()
    state, before = torch.random.get_rng_state(), X.clone()
    adapter(X)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.equal(X, before)


def test_further_arguments_reach_the_model() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = small_convnet()

        def forward(self, x: Tensor, scale: Tensor, *, shift: float = 0.0) -> Tensor:
            return self.net(x) * scale + shift

    model = Scaled()
    adapter = Adapter(model, [BatchNormStatistics(1.0)])
    plain = adapter(X, torch.tensor(1.0))
    assert torch.allclose(adapter(X, torch.tensor(2.0), shift=1.0), plain * 2 + 1)


def test_repr_tells_what_it_does() -> None:
    text = repr(adapted(steps=2))
    assert "forgetting=episodic, steps=2, logits=after" in text
    assert "components=20, folded" in text
    assert "forgetting=episodic" in repr(Adapter(small_convnet()))


# Bad input: the model is as it was.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "`steps` must be a whole number from 1 on; found 0"),
        ({"steps": 1.5}, "found 1.5"),
        ({"steps": True}, "found True"),
        ({"forgetting": "never"}, "`forgetting` must be one of episodic, online, continual"),
        ({"logits": "both"}, "`logits` must be one of before, after; found 'both'"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, object], message: str) -> None:
    model = small_convnet()
    with left_untouched(model, X), pytest.raises(OptionError, match=message):
        ttapca.adapt(model, "ttapca-relu", filter=FITTED, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("lr", [0.0, -1e-3, float("nan"), float("inf"), "fast", True])
def test_learning_rates_that_make_no_sense(lr: object) -> None:
    with pytest.raises(OptionError, match="`lr` must be a finite number above 0; found"):
        adam(lr)  # type: ignore[arg-type]


def test_nothing_to_move() -> None:
    model = small_convnet()
    with left_untouched(model, X), pytest.raises(OptionError, match="a surface with parameters"):
        Adapter(model, [BatchNormStatistics(1.0)], GradientSteps(mean_entropy))


def test_no_surface() -> None:
    model = small_convnet()
    with left_untouched(model, X), pytest.raises(OptionError, match="`Surface`; found a ReLU"):
        Adapter(model, [nn.ReLU()])  # type: ignore[list-item]


def test_a_surface_that_does_not_fit_takes_the_others_away() -> None:
    model = small_convnet()
    stranger = ttapca.fit(small_convnet(seed=5), "conv1", DATA, 20)
    with left_untouched(model, X), pytest.raises(AttachError, match="belongs to the weights"):
        Adapter(
            model,
            [BatchNormStatistics(1.0), SpectralGains(stranger, "relu")],
            GradientSteps(mean_entropy),
        )


def test_two_adapters_on_one_model() -> None:
    first = adapted()
    during = first(X)
    with pytest.raises(AttachError, match="already"):
        ttapca.adapt(first.model, "ttapca-relu", filter=FITTED)
    with pytest.raises(AttachError, match="already"):
        ttapca.adapt(first.model, "bn")
    assert torch.equal(first(X), during)


def test_a_surface_already_in_use_stays_in_use() -> None:
    surface = SpectralGains(FITTED, "relu", initial=0.05)
    first = Adapter(small_convnet(), [surface], GradientSteps(mean_entropy))
    during = first(X)
    with pytest.raises(AttachError, match="attached already"):
        Adapter(small_convnet(), [surface], GradientSteps(mean_entropy))
    assert torch.equal(first(X), during)


def test_a_model_that_blocks_gradients() -> None:
    class Blocked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv1 = small_convnet().conv1

        def forward(self, x: Tensor) -> Tensor:
            return self.conv1(x).flatten(1).detach()

    adapter = ttapca.adapt(Blocked(), "ttapca-relu", filter=FITTED)
    with pytest.raises(AttachError, match="Gradients must reach"):
        adapter(X)


@pytest.mark.parametrize("output", [torch.zeros(3), {"logits": torch.zeros(3, 2)}], ids=repr)
def test_outputs_that_are_no_logits(output: object) -> None:
    with pytest.raises(LayerOutputError, match="must return logits as one tensor"):
        softmax_entropy(output)  # type: ignore[arg-type]


def test_entropy_of_dense_predictions_and_half_precision() -> None:
    logits = images(2, shape=(4, 3, 3))
    flat = logits.permute(0, 2, 3, 1).reshape(-1, 4)
    assert torch.allclose(softmax_entropy(logits).flatten(), softmax_entropy(flat))
    assert softmax_entropy(logits.to(torch.bfloat16)).dtype == torch.float32
    probabilities = torch.distributions.Categorical(logits=flat)
    assert torch.allclose(softmax_entropy(flat), probabilities.entropy())
