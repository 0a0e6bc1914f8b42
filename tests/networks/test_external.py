"""`hf:` and `timm:`: stand-ins for both packages, and the real one if installed; factories."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ttapca
from small_networks import smooth_images
from ttapca.errors import CheckpointError, FactoryError, OptionError
from ttapca.networks import describe_layers, load
from ttapca.networks.external import HubNetwork, call_factory, is_factory
from ttapca.networks.source import NetworkSource

IMAGES = torch.rand(40, 3, 16, 16, generator=torch.Generator().manual_seed(0))


@dataclass
class Output:
    """What models of transformers return, which is no tensor."""

    logits: Tensor


class Classifier(nn.Module):
    def __init__(self, as_output: bool, **config: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Conv2d(3, 4, 3)
        self.head = nn.Linear(4, 5)
        self.config = SimpleNamespace(num_labels=5, num_channels=3, **config)
        self._as_output = as_output

    def forward(self, pixel_values: Tensor) -> Any:
        logits = self.head(self.stem(pixel_values).mean((2, 3)))
        return Output(logits) if self._as_output else logits


def fake_transformers(folder: Path, error: Exception | None = None, **config: Any) -> ModuleType:
    """Return a module whose models are in one folder, and that must not use the network."""

    class Auto:
        @staticmethod
        def from_pretrained(name: str, *, local_files_only: bool, trust_remote_code: bool) -> Any:
            assert local_files_only
            assert not trust_remote_code
            if error is not None:
                raise error
            return Classifier(as_output=True, **config)

    def cached_file(name: str, file: str, *, local_files_only: bool) -> str:
        assert local_files_only
        if not (folder / file).is_file():
            raise OSError(f"no {file}")
        return str(folder / file)

    module = ModuleType("transformers")
    module.AutoModelForImageClassification = Auto  # type: ignore[attr-defined]
    module.utils = SimpleNamespace(cached_file=cached_file)  # type: ignore[attr-defined]
    return module


def loaded(
    processor: dict[str, Any] | None, folder: Path, monkeypatch: Any, **config: Any
) -> HubNetwork:
    if processor is not None:
        (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    monkeypatch.setitem(sys.modules, "transformers", fake_transformers(folder, **config))
    network = load("hf:someone/something")
    assert isinstance(network, HubNetwork)
    return network


SCALED = {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.25, 0.5, 0.5]}
EFFICIENT = {"image_processor_type": "EfficientNetImageProcessor"}  # it divides twice


@pytest.mark.parametrize(
    ("said", "pixels_become", "times"),
    [
        ({}, lambda x: x / 255, 1),
        ({"do_rescale": True, "rescale_factor": 1 / 255}, lambda x: x / 255, 1),
        ({"do_rescale": False}, lambda x: x, 1),
        ({"rescale_factor": 1 / 127.5, "rescale_offset": True}, lambda x: x / 127.5 - 1, 1),
        (EFFICIENT, lambda x: x / 255, 2),
        ({**EFFICIENT, "include_top": False}, lambda x: x / 255, 1),
    ],
)
def test_preprocessing_is_what_the_files_say(
    said: dict[str, Any], pixels_become: Any, times: int, tmp_path: Path, monkeypatch: Any
) -> None:
    network = loaded({**SCALED, "size": 16, **said}, tmp_path, monkeypatch)
    mean, std = (torch.tensor(values)[:, None, None] for values in SCALED.values())
    expected = network.model((pixels_become(IMAGES * 255) - mean) / std**times).logits
    torch.testing.assert_close(network(IMAGES), expected)
    assert (network.classes, network.input_shape, network.training) == (5, (3, 16, 16), False)


@pytest.mark.parametrize(("kind", "std"), [({}, [1.0] * 3), (EFFICIENT, [0.25, 0.5, 0.5])])
def test_images_that_are_not_normalised(
    kind: dict[str, Any], std: list[float], tmp_path: Path, monkeypatch: Any
) -> None:
    said = {"do_normalize": False, "size": 16, **kind, **(SCALED if kind else {})}
    network = loaded(said, tmp_path, monkeypatch)
    assert network.normalise.std.flatten().tolist() == std
    assert kind or not network.normalise.mean.any()


@pytest.mark.parametrize(
    ("labels", "names"),
    [
        ({number: f"class {number}" for number in range(5)}, [f"class {n}" for n in range(5)]),
        ({0: "only"}, []),
        (None, []),
    ],
)
def test_names_of_classes(
    labels: dict[int, str] | None, names: list[str], tmp_path: Path, monkeypatch: Any
) -> None:
    said = {"size": 16, "image_mean": [0.5], "image_std": [0.5]}
    assert list(loaded(said, tmp_path, monkeypatch, id2label=labels).class_names) == names


SQUARE = {"height": 28, "width": 28}
CROPPED = {"size": {"shortest_edge": 32}, "do_center_crop": True, "crop_size": 28}


@pytest.mark.parametrize(
    ("said", "config", "shape", "size", "shorter_side"),
    [
        ({"size": 20}, {}, (20, 20), 20, None),
        ({"size": {"height": 20, "width": 24}}, {}, (20, 24), (20, 24), None),
        ({"size": {"shortest_edge": 20}}, {}, (20, 20), 20, None),
        ({"size": {"shortest_edge": 224}, "crop_pct": 0.875}, {}, (224, 224), 224, 256),
        (CROPPED, {}, (28, 28), 28, 32),
        ({**CROPPED, "size": SQUARE, "crop_size": SQUARE}, {}, (28, 28), 28, None),
        ({}, {"image_size": 48}, (48, 48), 48, None),
        ({}, {"image_size": [32, 48]}, (32, 48), (32, 48), None),
        ({"size": [20, 24]}, {}, (20, 24), (20, 24), None),
        ({"size": {"shortest_edge": 384}, "crop_pct": 0.875}, {}, (384, 384), (384, 384), None),
    ],
)
def test_the_size_of_pictures(
    said: Any, config: Any, shape: Any, size: Any, shorter_side: Any, tmp_path: Path,
    monkeypatch: Any,
) -> None:  # fmt: skip
    network = loaded({**SCALED, **said}, tmp_path, monkeypatch, **config)
    assert network.input_shape == (3, *shape)
    assert (network.pictures.size, network.pictures.shorter_side) == (size, shorter_side)


@pytest.mark.parametrize(
    ("processor", "error", "message"),
    [
        (None, OptionError, "have no `image_mean` and `image_std`.* State it: normalisation"),
        (SCALED, CheckpointError, "must state the size of its images"),
        ({**SCALED, "size": -1}, CheckpointError, "preprocessor_config.json: `size` must be"),
        ({**SCALED, "image_std": "many"}, CheckpointError, "`image_std` must be a list"),
    ],
)
def test_files_that_say_too_little(
    processor: Any, error: type[Exception], message: str, tmp_path: Path, monkeypatch: Any
) -> None:
    with pytest.raises(error, match=message):
        loaded(processor, tmp_path, monkeypatch)


def test_a_stated_normalisation_counts(tmp_path: Path, monkeypatch: Any) -> None:
    fake = fake_transformers(tmp_path, image_size=16)
    monkeypatch.setitem(sys.modules, "transformers", fake)
    network = NetworkSource("hf:someone/something", normalisation="half").load(doubt=False)
    assert network.normalise.values.mean == (0.5, 0.5, 0.5)
    with pytest.raises(OptionError, match="`eps=` has no meaning for `hf:someone/something`"):
        load("hf:someone/something", eps=1e-3)
    with pytest.raises(OptionError, match="`weights=` has no meaning"):
        NetworkSource("hf:someone/something", weights=tmp_path / "a.pth").load()


def test_networks_that_are_not_there(tmp_path: Path, monkeypatch: Any) -> None:
    gone = fake_transformers(tmp_path, error=OSError("It is not in the cache.\nMore of this."))
    monkeypatch.setitem(sys.modules, "transformers", gone)
    said = r"must be a folder.*: It is not in the cache\. .*: hf download a/b$"
    with pytest.raises(OptionError, match=said):
        load("hf:a/b")
    other = fake_transformers(tmp_path, error=ValueError("Unrecognized configuration"))
    monkeypatch.setitem(sys.modules, "transformers", other)
    with pytest.raises(CheckpointError, match="it said: Unrecognized configuration"):
        load("hf:a/b")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(OptionError, match=r"needs the package transformers.*pip install transfor"):
        load("hf:a/b")


def test_everything_works_on_such_a_network(tmp_path: Path, monkeypatch: Any) -> None:
    network = loaded({**SCALED, "size": 16}, tmp_path, monkeypatch)
    layers = describe_layers(network, network.input_shape).layers
    assert {"normalise", "stem", "head"} == {layer.name for layer in layers}
    fitted = ttapca.fit(network, "stem", IMAGES, 5)
    assert fitted.layer == "stem"
    assert ttapca.adapt(network, "wiener", filter=fitted)(IMAGES).shape == (40, 5)


def fake_timm(config: Any, made: list[Any]) -> ModuleType:
    def create_model(name: str, *, pretrained: bool, pretrained_cfg_overlay: Any) -> nn.Module:
        assert pretrained
        made.append(pretrained_cfg_overlay)
        model: Any = Classifier(as_output=False)
        model.num_classes = 5
        model.pretrained_cfg = {
            "input_size": (3, 16, 16),
            "mean": (0.5, 0.4, 0.3),
            "std": (0.25, 0.5, 0.5),
            "crop_pct": 0.8,
        }
        return model

    module: Any = ModuleType("timm")
    module.create_model = create_model
    module.get_pretrained_cfg = {"tiny_net.a1_in1k": config}.get
    module.list_pretrained = lambda: ["tiny_net.a1_in1k"]
    return module


def fake_hub(cached: dict[tuple[str, str], Any]) -> ModuleType:
    module: Any = ModuleType("huggingface_hub")
    module.try_to_load_from_cache = lambda repository, file: cached.get((repository, file))
    return module


def test_timm_from_the_cache(tmp_path: Path, monkeypatch: Any) -> None:
    made: list[Any] = []
    config = SimpleNamespace(hf_hub_id="timm/tiny_net.a1_in1k", hf_hub_filename=None, url="")
    file = str(tmp_path / "pytorch_model.bin")
    known_to_be_missing = object()  # what the hub says about a file that the repository lacks
    cached = {
        ("timm/tiny_net.a1_in1k", "model.safetensors"): known_to_be_missing,
        ("timm/tiny_net.a1_in1k", "pytorch_model.bin"): file,
    }
    monkeypatch.setitem(sys.modules, "timm", fake_timm(config, made))
    monkeypatch.setitem(sys.modules, "huggingface_hub", fake_hub(cached))
    network = load("timm:tiny_net.a1_in1k")
    assert isinstance(network, HubNetwork)
    assert made == [{"file": file}]
    assert (network.pictures.size, network.pictures.shorter_side) == (16, 20)
    mean, std = (torch.tensor(values)[:, None, None] for values in SCALED.values())
    torch.testing.assert_close(network(IMAGES), network.model((IMAGES - mean) / std))

    monkeypatch.setitem(sys.modules, "huggingface_hub", fake_hub({}))
    said = r"must be in a cache.*: hf download timm/tiny_net.a1_in1k$"
    with pytest.raises(OptionError, match=said):
        load("timm:tiny_net.a1_in1k")
    with pytest.raises(OptionError, match=r"no network `tiny_net` with weights. Did you mean"):
        load("timm:tiny_net")
    assert len(made) == 1  # nothing else was made, so nothing was downloaded


def test_timm_from_the_cache_of_torch(tmp_path: Path, monkeypatch: Any) -> None:
    made: list[Any] = []
    config = SimpleNamespace(hf_hub_id=None, url="https://somewhere/tiny-1234.pth")
    monkeypatch.setitem(sys.modules, "timm", fake_timm(config, made))
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    with pytest.raises(OptionError, match=r"timm.create_model\('tiny_net.a1_in1k', pretrained"):
        load("timm:tiny_net.a1_in1k")
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "tiny-1234.pth").touch()
    load("timm:tiny_net.a1_in1k")
    assert made == [{"file": str(tmp_path / "checkpoints" / "tiny-1234.pth")}]


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("my_nets:smal", OptionError, "no function or class `smal`. Did you mean `small`"),
        ("my_nets:number", OptionError, "no function or class `number`[.]$"),
        ("my_nets:wrong", OptionError, "returns an `nn.Module`; .* returned a int"),
        ("my_net:small", OptionError, "no module `my_net`"),
        ("my_broken:small", FactoryError, "be imported: .*surely_not_installed.*line 1"),
        ("my_nets:needy", FactoryError, "`my_nets:needy` has failed: TypeError.*without arguments"),
        ("my_nets:raising", FactoryError, "`my_nets:raising` has failed: KeyError: 'gone'"),
        ("small", OptionError, "own network as `package.module:factory`; found `small`"),
    ],
)
def test_factories_that_do_not_work(
    name: str, error: type[Exception], message: str, tmp_path: Path, monkeypatch: Any
) -> None:
    (tmp_path / "my_nets.py").write_text(
        "from torch import nn\ndef small(): return nn.Linear(2, 3)\nnumber = 3\n"
        "def wrong(): return 3\n"
        "def needy(width, depth=2): return nn.Linear(width, depth)\n"
        "def raising(): return {}['gone']\n"
    )
    (tmp_path / "my_broken.py").write_text("import surely_not_installed\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert isinstance(call_factory("my_nets:small"), nn.Linear)
    assert is_factory("timmy:resnet50")
    assert not any(map(is_factory, ("a/b:c", "weights.pth", "C:/weights.pth", "timm:resnet50")))
    with pytest.raises(error, match=message):
        call_factory(name)


def test_a_transformer_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        image_size=16,
        patch_size=8,
        num_labels=5,
    )
    made = transformers.ViTForImageClassification(config).eval()
    made.save_pretrained(tmp_path)
    said = {**SCALED, "size": {"height": 16, "width": 16}}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(said))
    network = load(f"hf:{tmp_path}")
    mean, std = (torch.tensor(values)[:, None, None] for values in SCALED.values())
    torch.testing.assert_close(network(IMAGES), made((IMAGES - mean) / std).logits)
    with pytest.raises(OptionError, match="must be in a cache"):
        load(f"hf:{tmp_path / 'nothing'}")
    # Its filter is at the patch embedding, which has far fewer outputs than inputs.
    table = describe_layers(network, (3, 16, 16))
    assert table.recommended == "vit.embeddings.patch_embeddings.projection"
    fitted = ttapca.fit(network, table.recommended, smooth_images(60, 16))
    assert fitted.basis.at_input
    assert fitted.outliers_ is not None
    assert len(fitted.layer_norm_) == 3
    with ttapca.adapt(network, "wiener", filter=fitted) as adapted:
        assert adapted(IMAGES).shape == (len(IMAGES), 5)
