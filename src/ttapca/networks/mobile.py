"""Networks for telephones, made of inverted residuals, with the names of published weights.

An inverted residual widens its input with a 1x1 convolution, works on each channel alone, and
narrows the result with another 1x1 convolution (Sandler and others, 2018). MobileNetV2 has the
names of torchvision's weights.
"""

from __future__ import annotations

from torch import Tensor, nn

STEM = 32
HEAD = 1280

# Of each stage: widening, channels, blocks, stride of the first (table 2 of the paper).
MOBILENET_V2 = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)


def convolved(
    inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1
) -> nn.Sequential:
    """Make a padded convolution with BatchNorm and ReLU6."""
    padding = kernel // 2
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, stride, padding, groups=groups, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU6(),
    )


class InvertedResidual(nn.Module):
    """A block of MobileNetV2; it has a shortcut where input and output have the same shape."""

    def __init__(self, inputs: int, outputs: int, stride: int, widening: int) -> None:
        super().__init__()
        width = inputs * widening
        self.conv = nn.Sequential(
            *([convolved(inputs, width, 1)] if widening != 1 else []),
            convolved(width, width, 3, stride, groups=width),
            nn.Conv2d(width, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self._shortcut = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, inputs, h, w) to (batch, outputs, h / stride, w / stride)."""
        out: Tensor = self.conv(x)
        return x + out if self._shortcut else out


def mobilenet_v2(channels: int, classes: int) -> dict[str, nn.Module]:
    """Make the layers of MobileNetV2 at its usual width."""
    features: list[nn.Module] = [convolved(channels, STEM, 3, 2)]
    inputs = STEM
    for widening, outputs, blocks, stride in MOBILENET_V2:
        for number in range(blocks):
            first = stride if number == 0 else 1
            features.append(InvertedResidual(inputs, outputs, first, widening))
            inputs = outputs
    features.append(convolved(inputs, HEAD, 1))
    classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(HEAD, classes))
    return {"features": nn.Sequential(*features), "classifier": classifier}
