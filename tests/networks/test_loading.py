"""`load`: the right network from what a file holds, or a message that helps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from ttapca.datasets import read_npz
from ttapca.errors import CheckpointError, FactoryError, OptionError
from ttapca.networks import (
    ARCHITECTURES,
    Normalisation,
    add_rotation_head,
    build,
    evaluate,
    load,
    load_rotation,
    load_weights,
    loading,
)
from ttapca.networks.factories import is_factory, make
from ttapca.networks.matching import guess_architecture
from ttapca.networks.rotation import published_name
from ttapca.networks.weight_files import write_safetensors, write_weights

SHARED = Path(__file__).parents[2].parent / "shared" / "data"
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason=f"{SHARED} is not on this machine")
IMAGES = torch.rand(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def described_by_a_stranger(path: Path, architecture: str, description: object) -> None:
    """A file that says that ttapca wrote it."""
    words = {"format": "ttapca.weights", "description": json.dumps(description)}
    write_safetensors(path, build(architecture).state_dict(), words)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "resnet20.pth"
    torch.save({"state_dict": build("resnet20", classes=7).state_dict()}, path)
    return path


def test_a_loaded_network_predicts_as_the_saved_one(checkpoint: Path) -> None:
    network = load(checkpoint, normalisation="half")
    expected = build("resnet20", classes=7, normalisation="half").eval()
    assert not network.training
    assert torch.equal(network(IMAGES), expected(IMAGES))


@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name < "wrn-3"])
def test_every_architecture_is_recognised(name: str) -> None:
    with torch.device("meta"):
        tensors = ARCHITECTURES[name].make(3, "half", (1, 32, 32)).state_dict()
    assert guess_architecture(tensors) == name


def test_a_file_without_counters_of_batches(tmp_path: Path) -> None:
    tensors = build("resnet20").state_dict()
    torch.save({k: v for k, v in tensors.items() if "num_batches" not in k}, tmp_path / "old.pth")
    assert load(tmp_path / "old.pth", normalisation="none").classes == 10


def test_the_wrong_architecture_names_the_right_one(checkpoint: Path) -> None:
    with pytest.raises(CheckpointError, match=r"do not fit `resnet32`: missing") as caught:
        load(checkpoint, "resnet32", normalisation="none")
    text = str(caught.value)
    assert "missing `layer1.3.conv1.weight`, " in text
    assert " more. They are those of the architecture `resnet20` with 7 classes." in text
    with pytest.raises(CheckpointError, match=r"unexpected `layer1.0.*wrong shape `bn1.weight`"):
        load(checkpoint, "wrn-16-2", normalisation="none")


def test_weights_of_an_unknown_network(tmp_path: Path) -> None:
    torch.save(nn.Linear(2, 3).state_dict(), tmp_path / "a.pth")
    with pytest.raises(CheckpointError, match=r"start with `weight`, `bias`.*--model package"):
        load(tmp_path / "a.pth")
    with pytest.raises(CheckpointError, match=r"missing `conv1.weight`.*No architecture of ttapca"):
        load(tmp_path / "a.pth", "resnet20", normalisation="none")


def test_the_normalisation_must_be_stated_or_known(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"does not say what .*State it: .*none, half, cifar10"):
        load(checkpoint)
    told = {"normalisation": {"mean": [0.5], "std": [0.25]}}
    write_weights(tmp_path / "own.safetensors", build("resnet20").state_dict(), told)
    assert load(tmp_path / "own.safetensors").normalise.values.std == (0.25, 0.25, 0.25)
    broken = {"normalisation": {"mean": [0.5]}}
    described_by_a_stranger(tmp_path / "own.safetensors", "resnet20", broken)
    with pytest.raises(CheckpointError, match=r"own.safetensors: `normalisation` .* with `std`"):
        load(tmp_path / "own.safetensors")


@pytest.mark.parametrize(
    ("description", "message"),
    [
        ({"architecture": "wrn-70-16"}, "do not fit `wrn-70-16`"),  # a gigabyte, if it were built
        ({"architecture": "resnet21"}, r"`architecture` must be one of .*Did you mean"),
        ({"input_shape": [1000, 32, 32]}, "do not fit `resnet20`: wrong shape `conv1.weight`"),
        ({"normalisation": {"mean": [0.0] * 2, "std": [1.0]}}, "normalisation in .* 3 channels"),
    ],
)
def test_nothing_is_built_from_a_description_that_does_not_fit(
    description: dict[str, object], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "own.safetensors"
    said = {"architecture": "resnet20", "normalisation": {"mean": [0.0], "std": [1.0]}}
    described_by_a_stranger(path, "resnet20", {**said, **description})

    def never(*args: object, **options: object) -> None:
        raise AssertionError("a network was built")

    monkeypatch.setattr(loading, "build", never)
    with pytest.raises(CheckpointError, match=f"(?s)(?=.*own.safetensors).*{message}"):
        load(path)


@pytest.mark.parametrize("name", ["conv1.weight", "fc.weight"])
def test_an_empty_tensor_of_an_absurd_shape(name: str, tmp_path: Path) -> None:
    tensors = build("resnet20").state_dict()
    tensors[name] = torch.zeros((0, 10**9, 3, 3) if name == "conv1.weight" else (10**9, 0))
    write_safetensors(tmp_path / "a.safetensors", tensors)
    with pytest.raises(CheckpointError, match=r"a.safetensors .*do not fit `resnet20`"):
        load(tmp_path / "a.safetensors", "resnet20", normalisation="none")


@pytest.mark.parametrize("shape", [(32, 32), (3, 0, 32), (3, 10**6, 10**6), (3.0, 32, 32)])
def test_shapes_of_images_that_make_no_sense(shape: tuple[int, ...]) -> None:
    with pytest.raises(OptionError, match=r"`input_shape.* must be"):
        build("small-cnn", input_shape=shape)


def test_a_rotation_head_that_does_not_fit(tmp_path: Path) -> None:
    twofold = add_rotation_head(build("resnet20"), "layer2", torch.Generator().manual_seed(5))
    tensors = {published_name(name): value for name, value in twofold.state_dict().items()}
    path = tmp_path / "two.safetensors"
    described = {"rotation_split": "layer9", "normalisation": {"mean": [0.0], "std": [1.0]}}
    write_weights(path, tensors, described)
    with pytest.raises(CheckpointError, match=r"two.safetensors fits no layer: .*`layer9`"):
        load_rotation(path)
    tensors["rotation_head.conv1.weight"] = torch.zeros(0, 10**9, 3, 3)
    write_weights(path, tensors, {**described, "rotation_split": "layer2"})
    with pytest.raises(CheckpointError, match=r"two.safetensors do not fit `rotation head`"):
        load_rotation(path)


def test_complex_weights_for_a_real_network(tmp_path: Path) -> None:
    tensors = {
        name: tensor.to(torch.complex64) for name, tensor in nn.Linear(2, 1).state_dict().items()
    }
    torch.save(tensors, tmp_path / "a.pth")
    with pytest.raises(CheckpointError, match=r"is real, and complex in .*a.pth"):
        load_weights(nn.Linear(2, 1), tmp_path / "a.pth")


def test_weights_that_are_not_numbers(tmp_path: Path) -> None:
    tensors = build("resnet20").state_dict()
    tensors["fc.bias"][3] = torch.nan
    torch.save(tensors, tmp_path / "a.pth")
    with pytest.raises(CheckpointError, match=r"finite numbers; `fc.bias`"):
        load(tmp_path / "a.pth", normalisation="none")


def test_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "cifar10-resnet20.safetensors"
    described = {"normalisation": {"mean": [0.0], "std": [1.0]}}
    halved = {
        k: v.half() if v.is_floating_point() else v
        for k, v in build("resnet20").state_dict().items()
    }
    write_weights(path, halved, described)
    monkeypatch.setattr(loading, "packaged", lambda: {path.stem: path})
    network = load("cifar10-resnet20")
    assert network.conv1.weight.dtype == torch.float32  # whatever it is stored in
    with pytest.raises(OptionError, match=r"neither a packaged.* Did you mean `cifar10-resnet20`"):
        load("cifar-resnet20")
    with pytest.raises(OptionError, match=r"`resnet20` is an architecture, which has no weights"):
        load("resnet20")


def test_a_rotation_head_travels_with_its_network(tmp_path: Path) -> None:
    twofold = add_rotation_head(build("resnet20"), "layer2", torch.Generator().manual_seed(5))
    tensors = {published_name(name): value for name, value in twofold.state_dict().items()}
    assert "conv1.weight" in tensors
    assert "rotation_head.conv1.weight" in tensors
    path = tmp_path / "two.safetensors"
    described = {"rotation_split": "layer2", "normalisation": {"mean": [0.0], "std": [1.0]}}
    write_weights(path, tensors, described)
    twofold.eval()
    found = load_rotation(path)
    assert torch.equal(found.rotation_logits(IMAGES), twofold.rotation_logits(IMAGES))
    assert torch.equal(load(path)(IMAGES), twofold(IMAGES))  # and is no burden without


def test_no_rotation_head(checkpoint: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has none. Train one with"):
        load_rotation(checkpoint, normalisation="none")


def test_a_network_of_your_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_networks_4.py").write_text(
        "from torch import nn\ndef small(): return nn.Linear(2, 3)\nnumber = 3\n"
        "def wrong(): return 3\n"
        "def needy(width, depth=2): return nn.Linear(width, depth)\n"
        "def raising(): return {}['gone']\n"
    )
    (tmp_path / "my_broken_4.py").write_text("import surely_not_installed\n")
    monkeypatch.syspath_prepend(tmp_path)
    network = make("my_networks_4:small")
    torch.save(nn.Linear(2, 3).state_dict(), tmp_path / "a.pth")
    assert load_weights(network, tmp_path / "a.pth") is network
    torch.save(nn.Linear(3, 3).state_dict(), tmp_path / "a.pth")
    with pytest.raises(
        CheckpointError, match=r"do not fit `Linear`: wrong shape `weight` \(3, 3\)"
    ):
        load_weights(network, tmp_path / "a.pth")
    with pytest.raises(OptionError, match=r"no function or class `smal`. Did you mean `small`"):
        make("my_networks_4:smal")
    with pytest.raises(OptionError, match=r"no function or class `number`"):
        make("my_networks_4:number")
    with pytest.raises(OptionError, match=r"gives an `nn.Module`; .* gave a int"):
        make("my_networks_4:wrong")
    with pytest.raises(OptionError, match=r"no module `my_network_5`"):
        make("my_network_5:small")
    with pytest.raises(FactoryError, match=r"cannot be imported: .*surely_not_installed.*line 1"):
        make("my_broken_4:small")
    with pytest.raises(
        OptionError, match=r"without arguments; `my_networks_4:needy` takes \(width"
    ):
        make("my_networks_4:needy")
    with pytest.raises(FactoryError, match=r"`my_networks_4:raising` has failed: KeyError: 'gone'"):
        make("my_networks_4:raising")
    with pytest.raises(OptionError, match=r"named `package.module:factory`; found `small`"):
        make("small")
    assert not is_factory("a/b:c")


@needs_shared
@pytest.mark.parametrize(
    ("file", "architecture", "normalisation", "classes"),
    [
        ("cifar10_resnet20.pth", "resnet20", "cifar10", 10),
        ("cifar100_resnet20.pth", "resnet20", "cifar100", 100),
        ("cifar10_rn26_gn_state_dict.pt", "resnet26-gn", "half", 10),
    ],
)
def test_published_checkpoints_are_recognised(
    file: str, architecture: str, normalisation: str, classes: int
) -> None:
    tensors = torch.load(SHARED / "weights" / file, weights_only=True)
    assert guess_architecture(tensors) == architecture
    assert load(SHARED / "weights" / file, normalisation=normalisation).classes == classes


@needs_shared
@pytest.mark.parametrize(
    ("file", "normalisation", "right"),
    [("cifar10_resnet20.pth", "cifar10", 185), ("cifar10_rn26_gn_state_dict.pt", "half", 184)],
)
def test_published_checkpoints_predict(file: str, normalisation: str, right: int) -> None:
    """On the first 200 test images; all 10,000 give 92.60 % and 90.83 % (docs/networks.md)."""
    images = read_npz(SHARED / "cifar10c_reference" / "first200.npz", images="clean")
    outcome = evaluate(load(SHARED / "weights" / file, normalisation=normalisation), images)
    assert round(outcome.accuracy * 2) == right
    other = Normalisation((0.0,), (1.0,))
    worse = evaluate(load(SHARED / "weights" / file, normalisation=other), images)
    assert worse.error > outcome.error + 5
