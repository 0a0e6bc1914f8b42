"""The shapes of answers, with examples: what `/openapi.json` says.

Answers are not built from these classes, which would cost time at every request; a test compares
what is answered with them.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from ttapca.serving.answers import Mode

Share = Annotated[float, Field(ge=0, le=1)]


class _Answer(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ErrorFacts(_Answer):
    """Why a request was refused."""

    code: str = Field(description="A word for programs.", examples=["unknown_stream"])
    message: str = Field(
        description="For people: the rule, what was found, the way out.",
        examples=["There is no stream `camera-7`. Send images to begin it."],
    )


class ErrorAnswer(_Answer):
    """What every refusal looks like."""

    error: ErrorFacts


class BandFacts(_Answer):
    """One band of components of the filter in one stream."""

    layer: str = Field(examples=["conv1"])
    first: int = Field(examples=[8], description="Its first component, counting from 1.")
    last: int = Field(examples=[15])
    ratio: float | None = Field(
        examples=[2.6], description="Variance in the stream over that in the source."
    )
    p_value: Share | None = Field(examples=[0.01])


class HealthFacts(_Answer):
    """What is seen of the images of a stream; null where nobody can tell."""

    stream: str = Field(examples=["camera-7"])
    images: int = Field(examples=[1200])
    skipped: int = Field(examples=[0], description="Requests whose numbers were not finite.")
    shifted: bool | None = Field(examples=[True], description="Whether the alarm is on.")
    p_value: Share | None = Field(examples=[0.002])
    shift: Share | None = Field(examples=[0.97], description="How surely images have shifted.")
    size: float | None = Field(examples=[1.5], description="Size of the shift, in doublings.")
    bands: list[BandFacts]
    composition: list[float] | None = Field(description="Share of each class of late.")
    ordered: Share | None = Field(description="How surely classes stay for a while.")
    run_length: float | None = Field(description="For how many images a class stays, if so.")
    skew: Share | None = Field(
        examples=[0.1], description="How surely classes are not those of the source."
    )
    conditions: int = Field(examples=[1])
    outliers: float | None = Field(examples=[0.004])
    batch_weight: float | None = Field(examples=[0.2])
    implausible: int = Field(
        ge=0, description="Images that no shift explains, answered by the network as it is."
    )


class StreamFacts(_Answer):
    """How a stream is and what was done with it."""

    health: HealthFacts
    mode: Mode = Field(examples=["on"])
    gains: list[float | None] = Field(
        examples=[[1.0, 0.98, 0.41]], description="What each band is scaled by."
    )
    requests: int = Field(examples=[400])
    adapted_share: Share = Field(examples=[0.6])
    disagreement: Share | None = Field(examples=[None])
    shifted_since: float | None = Field(
        examples=[1763300000.0], description="When the alarm went on, in seconds since 1970."
    )
    last_seen: float | None = Field(examples=[1763300100.0])


class StreamBrief(_Answer):
    """What costs nothing to tell about a stream."""

    stream: str = Field(examples=["camera-7"])
    mode: Mode = Field(examples=["on"])
    images: int = Field(examples=[1200])
    requests: int = Field(examples=[400])
    skipped: int = Field(examples=[0])
    shift: Share = Field(examples=[0.97])
    shifted: bool = Field(examples=[True])
    adapted_share: Share = Field(examples=[0.6])
    disagreement: Share | None = Field(examples=[None])
    shifted_since: float | None = Field(examples=[1763300000.0])
    last_seen: float | None = Field(examples=[1763300100.0])


class LikelyClass(_Answer):
    """A class, or a label, and how probable it is."""

    class_: int = Field(alias="class", examples=[3])
    name: str | None = Field(examples=["cat"], description="Null where classes have no names.")
    probability: Share | None = Field(examples=[0.91])


class Prediction(LikelyClass):
    """What is predicted for one image: the most probable class or label."""

    labels: list[LikelyClass] = Field(
        default=[],
        description="Of a network whose labels do not exclude each other: all that are more "
        "probable than not. Other networks leave it out.",
    )


class PredictAnswer(_Answer):
    """What is predicted for the images of a request, in their order."""

    stream: str = Field(examples=["camera-7"])
    mode: Mode = Field(examples=["on"])
    adapted: bool = Field(examples=[True], description="Whether a filter changed what is answered.")
    predictions: list[Prediction]
    differ: int | None = Field(
        examples=[None], description="In shadow: how many images have another class when adapted."
    )
    health: StreamBrief | StreamFacts = Field(description="All about it with `full=true`.")


class StreamList(_Answer):
    """A page of streams, by name."""

    streams: list[StreamFacts] | list[StreamBrief]
    damaged: list[str] = Field(
        examples=[[]], description="Streams of this page that cannot be read from disk."
    )
    total: int = Field(examples=[1])


class Pictures(_Answer):
    """The last image of a stream as `data:` URLs; null where none is kept."""

    before: str | None = Field(examples=["data:image/png;base64,iVBORw0KGgo="])
    after: str | None = Field(examples=["data:image/png;base64,iVBORw0KGgo="])


class InfoBand(_Answer):
    """First and last component of a band, counting from 1."""

    first: int = Field(examples=[8])
    last: int = Field(examples=[15])


class Info(_Answer):
    """What is served."""

    model: str = Field(examples=["cifar10-resnet20"])
    filter: str = Field(examples=["conv1, 2000 components"])
    classes: list[str] = Field(examples=[["airplane", "automobile"]])
    input_shape: list[int] = Field(examples=[[3, 32, 32]])
    version: str = Field(examples=["0.2.0"])
    bands: list[InfoBand]


class ModeChange(_Answer):
    """What a stream is switched to."""

    mode: Mode = Field(examples=["shadow"])


class Alive(_Answer):
    """Whether the service runs, or is ready."""

    status: str = Field(examples=["ok"])
