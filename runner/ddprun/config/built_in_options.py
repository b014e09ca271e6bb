"""Options of what is built in and has no file of its own: models, data, losses, metrics, mutations, updates.

The docstring of a class is its line in `ddprun catalog`, the one under a field its line in the JSON Schema.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, Field, model_validator

from ddprun.options import (
    CustomValidator,
    FractionFloat,
    NonNegativeInt,
    NoOptions,
    Options,
    PositiveFloat,
    PositiveInt,
    PositiveInts,
    expected,
    problem,
)

NonEmptyString = Annotated[str, Field(min_length=1)]
_Strings = Annotated[tuple[NonEmptyString, ...], Field(strict=False, min_length=1)]
_StringOrStrings = NonEmptyString | _Strings
OneOrMoreStrings = Annotated[
    _Strings,
    BeforeValidator(lambda value: [value] if isinstance(value, str) and value else value, _StringOrStrings),
]
"""A list of strings, or one by itself."""


class MlpOptions(Options):
    """Linear layers with an activation between them, on flat inputs."""

    inputs: PositiveInt
    """Values per sample; samples of any shape are flattened."""

    hidden: PositiveInts = ()
    """Width of each hidden layer; none makes it a linear model."""

    outputs: PositiveInt
    """Output values per sample: the number of classes."""

    activation: Literal["relu", "gelu", "tanh"] = "relu"
    """The activation after each hidden layer."""


class CnnOptions(Options):
    """3x3 convolutions, each with BatchNorm and ReLU, then an average over the image and a linear layer."""

    channels: Annotated[PositiveInts, Field(min_length=1)] = (16, 32)
    """Channels after each convolution."""

    inputs: Annotated[PositiveInts, Field(min_length=3, max_length=3)] = (1, 8, 8)
    """Channels, height and width of a sample."""

    outputs: PositiveInt = 10
    """Values per sample that come out: the number of classes."""


class TransformerOptions(Options):
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
    """Largest number of tokens that it sees."""

    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of values dropped while training."""

    @model_validator(mode="after")
    def _check_width_divisible_by_heads(self) -> Self:
        if self.width % self.heads:
            text = f"width {self.width} cannot be shared among {self.heads} heads"
            raise problem(text, "width must be a multiple of heads", at="width")
        return self


class DigitsOptions(Options):
    """1,797 handwritten digits of 8x8 pixels from the UCI repository, values 0 to 1, ten classes."""

    held_out: FractionFloat | None = 0.2
    """Share of samples kept for `evaluate`; null keeps none."""

    split_seed: NonNegativeInt = 0
    """Decides which samples are held out, whatever the pipeline's seed is."""


class TextDataOptions(Options):
    """The bytes of local files, cut into windows; the target is the window shifted by one byte."""

    files: OneOrMoreStrings
    """Paths or globs, relative to the pipeline's folder; `{stdlib}` is Python's standard library."""

    context: PositiveInt = 128
    """Bytes per sample."""

    held_out: FractionFloat | None = 0.1
    """Share of the bytes kept for `evaluate`; null keeps none."""


class SyntheticDataOptions(Options):
    """Random samples made on the spot, for timing: no data set is read."""

    samples: PositiveInt = 4096
    """Samples to train on."""

    shape: Annotated[PositiveInts, Field(min_length=1)] = (64,)
    """Shape of one sample."""

    dtype: Literal["float32", "float64", "int64"] = "float32"
    """Type of the inputs; int64 makes tokens, and the target of each is the next one."""

    classes: Annotated[int, Field(gt=1)] = 10
    """Number of classes of the targets, or of different tokens."""

    held_out: NonNegativeInt = 1024
    """Further samples kept for `evaluate`; 0 keeps none."""


class NoiseOptions(Options):
    """Add normally distributed noise to each trained parameter, different on each rank."""

    std: PositiveFloat
    """Standard deviation of the noise, in units of the weights."""


class EvolutionStrategiesOptions(Options):
    """The optimizer steps on a gradient that forward passes estimate: random changes of the weights, each
    weighted by what it does to the loss (Salimans et al. 2017, arXiv:1703.03864).
    """

    std: PositiveFloat = 0.05
    """Standard deviation of the changes, in units of the weights."""

    population: PositiveInt = 8
    """Changes that each rank tries in a step, each added and subtracted: twice as many forward passes."""


class ModelLossOptions(NoOptions):
    """The model returns its loss itself: a tensor, or an object or mapping with `loss`."""


class AccuracyOptions(NoOptions):
    """Share of samples whose largest output is the target."""


class PerplexityOptions(NoOptions):
    """Exponential of the mean cross-entropy per target."""


def parse_batch_key(value: Any, *at: str | int) -> Any:
    """The key itself; a ValidationError `at` its place below what is being validated."""
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise expected("the key of a mapping, or the place of an item", at=at, got=value)
    return value


_StringOrInt = NonEmptyString | int
BatchKey = Annotated[Any, CustomValidator(parse_batch_key, _StringOrInt)]
"""Of a part of a batch: the key of a mapping or the attribute of an object, or a place in a tuple or list."""


class WeightBySamplesOptions(NoOptions):
    """Each sample counts as much as any other."""


class WeightByTargetsOptions(Options):
    """Each target that is not ignored counts as much as any other, such as the tokens of padded text."""

    of: BatchKey | None = None
    """The part of a batch with the targets; null is what the loss compares with."""

    ignore_index: int | None = None
    """Targets of this value do not count; null is that of the loss, or -100 where it has none."""

    shift: NonNegativeInt = 0
    """The number of first targets of each sequence that do not count: 1 where the model shifts its labels."""


MODEL_OPTIONS: dict[str, type[BaseModel]] = {
    "mlp": MlpOptions,
    "cnn": CnnOptions,
    "transformer": TransformerOptions,
}
DATA_OPTIONS: dict[str, type[BaseModel]] = {
    "digits": DigitsOptions,
    "text": TextDataOptions,
    "synthetic": SyntheticDataOptions,
}
LOSS_OPTIONS: dict[str, type[BaseModel]] = {"model": ModelLossOptions}
MUTATION_OPTIONS: dict[str, type[BaseModel]] = {"noise": NoiseOptions}
UPDATE_OPTIONS: dict[str, type[BaseModel]] = {"evolution_strategies": EvolutionStrategiesOptions}
WEIGHT_BY_OPTIONS: dict[str, type[BaseModel]] = {
    "samples": WeightBySamplesOptions,
    "targets": WeightByTargetsOptions,
}
METRIC_OPTIONS: dict[str, type[BaseModel]] = {"accuracy": AccuracyOptions, "perplexity": PerplexityOptions}
