"""Options of everything that is built in: models, data, sync policies. Hooks bring theirs in `ddprun_hooks`.

The docstring of a class is its line in `ddprun catalog`, the one under a field its line in the JSON Schema.
"""

import re
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    WithJsonSchema,
    model_validator,
)

from ddprun.spec.problems import problem, within


class Options(BaseModel):
    """Base of every part of a pipeline: strict, frozen, nothing unknown, finite numbers only."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class NoOptions(Options):
    """Base of everything that takes no options."""


PositiveInt = Annotated[int, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
Sizes = Annotated[tuple[PositiveInt, ...], Field(strict=False)]
"""A list of sizes, each at least 1."""

Share = Annotated[float, Field(gt=0, lt=1)]


class Mlp(Options):
    """Linear layers with an activation between them, on flat inputs."""

    inputs: PositiveInt
    """Values per sample; samples of any shape are flattened."""

    hidden: Sizes = ()
    """Width of each hidden layer; none makes it a linear model."""

    outputs: PositiveInt
    """Values per sample that come out: the number of classes."""

    activation: Literal["relu", "gelu", "tanh"] = "relu"
    """What stands after each hidden layer."""


class Cnn(Options):
    """3x3 convolutions, each with BatchNorm and ReLU, then an average over the image and a linear layer."""

    channels: Annotated[Sizes, Field(min_length=1)] = (16, 32)
    """Channels after each convolution."""

    inputs: Annotated[Sizes, Field(min_length=3, max_length=3)] = (1, 8, 8)
    """Channels, height and width of a sample."""

    outputs: PositiveInt = 10
    """Values per sample that come out: the number of classes."""


class Transformer(Options):
    """A causal transformer over tokens, bytes by default: each position predicts the next token."""

    vocabulary: PositiveInt = 256
    """Number of tokens; 256 for bytes."""

    width: PositiveInt = 128
    """Values per position; a multiple of `heads`."""

    layers: PositiveInt = 2
    """Blocks of attention and feed-forward."""

    heads: PositiveInt = 4
    """Attention heads in each layer."""

    context: PositiveInt = 128
    """Tokens it sees at most."""

    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of values dropped while training."""

    @model_validator(mode="after")
    def _heads_share_the_width(self) -> Self:
        if self.width % self.heads:
            text = f"width {self.width} cannot be shared among {self.heads} heads"
            raise within(problem(text, "width must be a multiple of heads"), "width")
        return self


class Digits(Options):
    """1,797 handwritten digits of 8x8 pixels from the UCI repository, values 0 to 1, ten classes."""

    held_out: Share | None = 0.2
    """Share of samples kept for `evaluate`; null keeps none."""

    split_seed: NonNegativeInt = 0
    """Decides which samples are held out, whatever the pipeline's seed is."""


def _one_or_many(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _known_placeholder(pattern: str) -> str:
    for found in re.findall(r"\{[^{}]*\}", pattern):
        if found != "{stdlib}":
            raise problem(
                f"unknown placeholder {found}", "allowed: {stdlib}, the folder of Python's own library"
            )
    return pattern


FilePattern = Annotated[str, Field(min_length=1), AfterValidator(_known_placeholder)]


class Text(Options):
    """The bytes of local files, cut into windows; the target is the window shifted by one byte."""

    files: Annotated[
        tuple[FilePattern, ...],
        Field(strict=False, min_length=1),
        BeforeValidator(_one_or_many),
        WithJsonSchema(
            {
                "anyOf": [
                    {"type": "string", "minLength": 1},
                    {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1},
                ]
            }
        ),
    ]
    """Paths or globs, relative to the pipeline's folder; `{stdlib}` is the folder of Python's own library."""

    context: PositiveInt = 128
    """Bytes per sample."""

    held_out: Share | None = 0.1
    """Share of the bytes kept for `evaluate`; null keeps none."""


class Synthetic(Options):
    """Random samples made on the spot, for timing: no data set is read."""

    samples: PositiveInt = 4096
    """Samples to train on."""

    shape: Annotated[Sizes, Field(min_length=1)] = (64,)
    """Shape of one sample."""

    dtype: Literal["float32", "float64", "int64"] = "float32"
    """Type of the inputs; int64 makes tokens."""

    classes: Annotated[int, Field(gt=1)] = 10
    """Number of classes of the targets."""

    held_out: NonNegativeInt = 1024
    """Further samples kept for `evaluate`; 0 keeps none."""


class EveryStep(NoOptions):
    """Gradients are averaged over all ranks at every optimizer step: plain DDP."""


class ModelsOwnLoss(NoOptions):
    """The model returns its loss itself: a tensor, or an object or mapping with `loss`."""


class Accuracy(NoOptions):
    """Share of samples whose largest output is the target."""


class Perplexity(NoOptions):
    """Exponential of the mean cross-entropy per target."""


MODELS: dict[str, type[BaseModel]] = {"mlp": Mlp, "cnn": Cnn, "transformer": Transformer}
DATA: dict[str, type[BaseModel]] = {"digits": Digits, "text": Text, "synthetic": Synthetic}
LOSSES: dict[str, type[BaseModel]] = {"model": ModelsOwnLoss}
SYNC: dict[str, type[BaseModel]] = {"every_step": EveryStep}
METRICS: dict[str, type[BaseModel]] = {"accuracy": Accuracy, "perplexity": Perplexity}
