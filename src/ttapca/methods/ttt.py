"""`ttt`: learn which way up the test images are, with layers that also classify them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F  # noqa: N812 - the name that every PyTorch user knows
from torch import Tensor, nn

from ttapca._checks import Seed
from ttapca.adaptation.optimisation import Logits, Run, Stepper, sgd
from ttapca.adaptation.surfaces.trainable import Slot, Weights, all_parameters
from ttapca.errors import AttachError, LayerOutputError, ShapeError
from ttapca.methods.method import Assembly, GradientMethod, Method, Statistics, register
from ttapca.methods.views import Forward, images_and_forward
from ttapca.support.modules import evaluation_mode, find_layer, stopped_at
from ttapca.support.outputs import Reads

Rotations = Literal["all", "random"]


@register("ttt", needs="training", paper="Sun et al. (ICML 2020)")
@dataclass(frozen=True, kw_only=True)
class TTT(GradientMethod):
    """The weights up to a split, learned by telling rotations apart.

    A head theta_s, trained jointly with the network, tells the four rotations y_s of an image x
    apart from the features at a split point. The weights theta_e up to this point take steps on

        l_s(x; theta_s, theta_e) = cross-entropy(prediction for x rotated by y_s, y_s)

    while the head and the layers after the split stay as they are. The paper:
    https://arxiv.org/abs/1909.13231.

    Attributes:
        head: Maps the split layer's output to four logits; not moved, used in evaluation mode.
        split: Dotted path of the last layer that both tasks share.
        rotations: `all`: each image in all four rotations; `random`: each in one of them.
        seed: Draws the random rotations.
    """

    outputs = Method.outputs
    descent: ClassVar[Any] = staticmethod(sgd)

    logits: Logits = "after"
    statistics: Statistics = "source"
    head: nn.Module | None = None
    split: str | None = None
    rotations: Rotations = "all"
    seed: Seed | None = None

    def __post_init__(self) -> None:
        """Check the options."""
        self.require("head", "a rotation head that was trained jointly with the model")
        self.require("split", "the dotted path of the layer whose output the head takes")
        super().__post_init__()
        if self.rotations == "all":
            self.refuse("seed", "with all rotations nothing is drawn")

    def assemble(self) -> Assembly:
        """Return the weights up to the split, moved by rotations."""
        select = functools.partial(_weights_up_to, split=str(self.split))
        return self.assembly(
            Weights(select, "weights up to the split"), predictor=RotationSteps(self)
        )


class RotationSteps(Stepper):
    """Lowers the rotation loss of each batch."""

    reads: Reads = "nothing"
    _model: nn.Module  # set by `bind`

    def __init__(self, options: TTT) -> None:
        super().__init__(**options.stepping(), seed=options.seed or 0)
        self.head = options.head or nn.Identity()
        self.split = str(options.split)
        self.rotations: Rotations = options.rotations
        self._checked = False

    def bind(self, model: nn.Module, parameters: list[nn.Parameter]) -> None:
        """Take the parameters to move."""
        find_layer(model, self.split)
        super().bind(model, parameters)
        self._model = model

    def predict(self, run: Run, *inputs: Any, **options: Any) -> Tensor:
        """Step on the rotations of the batch, square images, and predict it."""
        images, forward = images_and_forward("ttt", run, inputs, options)

        def loss() -> Tensor:
            rotated, labels = self._rotated(images)
            found = F.cross_entropy(self._answers(rotated, forward), labels)
            self._check_reach(found)
            return found

        return self.step_and_predict(loss, functools.partial(forward, images))

    def _rotated(self, images: Tensor) -> tuple[Tensor, Tensor]:
        rotated, labels = four_rotations(images)
        if self.rotations == "all":
            return rotated, labels
        chosen = torch.randint(4, (len(images),), generator=self.generator).to(labels.device)
        index = chosen * len(images) + torch.arange(len(images), device=labels.device)
        return rotated[index], chosen

    def _answers(self, images: Tensor, forward: Forward) -> Tensor:
        """Return the head's logits, shape (images, 4)."""
        with stopped_at(find_layer(self._model, self.split)) as caught:
            forward(images)
        if not caught or not isinstance(caught[0], Tensor):
            found = f"a {type(caught[0]).__name__}" if caught else "that it is never called"
            raise LayerOutputError(
                f"The split layer `{self.split}` returns one tensor in a forward pass; found "
                f"{found}. Choose another layer."
            )
        with evaluation_mode(self.head):
            answers = self.head(caught[0])
        if not isinstance(answers, Tensor) or answers.shape != (len(images), 4):
            shape = tuple(getattr(answers, "shape", ())) or f"a {type(answers).__name__}"
            raise LayerOutputError(
                f"The head returns four logits for each image, shape ({len(images)}, 4); found "
                f"{shape} for the output of `{self.split}`, shape {tuple(caught[0].shape)}."
            )
        return answers

    def _check_reach(self, loss: Tensor) -> None:
        """Check, once, that no weight outside of the surface has a part in the loss."""
        outside = {n: p for n, p in self._model.named_parameters() if p.requires_grad}
        if self._checked or not outside or not loss.requires_grad:
            return
        # The surface's copies replace the weights that it moves, so only others are found.
        weights = list(outside.values())
        found = torch.autograd.grad(loss, weights, allow_unused=True, retain_graph=True)
        late = [f"`{name}`" for name, g in zip(outside, found, strict=True) if g is not None]
        if late:
            raise AttachError(
                "Weights up to the split are those registered before its end; "
                f"{', '.join(late)} come later but lead to `{self.split}`. Choose a split that is "
                "registered after them."
            )
        self._checked = True

    def tensors(self) -> list[Tensor]:
        """Return the tensors of the head as well."""
        return [*super().tensors(), *self.head.parameters(), *self.head.buffers()]

    def apply(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Convert the head as well."""
        super().apply(fn)
        self.head._apply(fn)  # type: ignore[no-untyped-call]


def four_rotations(images: Tensor) -> tuple[Tensor, Tensor]:
    """Return images turned by 0, 90, 180 and 270 degrees, one after another, and labels 0 to 3."""
    if images.shape[-2] != images.shape[-1]:
        raise ShapeError(
            f"Rotations need square images; found shape {tuple(images.shape)}. Crop or resize them."
        )
    rotated = torch.cat([torch.rot90(images, quarter, (-2, -1)) for quarter in range(4)])
    labels = torch.arange(4, device=images.device).repeat_interleave(len(images))
    return rotated, labels


def _weights_up_to(model: nn.Module, split: str) -> list[Slot]:
    """Return the parameters that are registered before the end of the layer with this path."""
    end = find_layer(model, split)
    modules = list(model.modules())
    inside = {id(module) for module in end.modules()}
    last = max(number for number, module in enumerate(modules) if id(module) in inside)
    before = {id(module) for module in modules[: last + 1]}
    return [(module, name) for module, name in all_parameters(model) if id(module) in before]
