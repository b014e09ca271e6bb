"""Built-in functions of the model: what `mutate` and the `update` of a forward stage name."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ddprun.sync.buffers import trainable_parameters


def noise(model: nn.Module, *, std: float) -> None:
    """Mutation: add Gaussian noise of this rank's own to all that is trained; `std` is in weights' units."""
    with torch.no_grad():
        for param in trainable_parameters(model).values():
            param.add_(torch.randn_like(param), alpha=std)


def evolution_strategies(
    model: nn.Module, closure: Callable[[], Tensor], *, std: float, population: int
) -> None:
    """Leave an estimate of the gradient in the parameters' `grad`, for the optimizer to step on.

    Each of `population` random directions ε is tried forwards and backwards (antithetic sampling), and the
    estimate is the mean of ε (L(w + std ε) - L(w - std ε)) / (2 std)
    (Salimans et al. 2017, arXiv:1703.03864, section 2).
    `closure` gives the loss of the model as it is, shape (); `std` is in units of the weights, which end as
    they were.
    """
    params = [param for param in model.parameters() if param.requires_grad]
    own = [param.detach().clone() for param in params]
    estimate = [torch.zeros_like(param) for param in params]
    with torch.no_grad():
        for _ in range(population):
            direction = [torch.randn_like(param) for param in params]
            losses = []
            for sign in (1.0, -1.0):
                for param, value, change in zip(params, own, direction, strict=True):
                    torch.add(value, change, alpha=sign * std, out=param)
                losses.append(closure())
            slope = (losses[0] - losses[1]) / (2 * std * population)
            for total, change in zip(estimate, direction, strict=True):
                total.add_(change * slope.to(change.dtype))
        for param, value in zip(params, own, strict=True):
            param.copy_(value)
    for param, total in zip(params, estimate, strict=True):
        param.grad = total


WEIGHT_FUNCTIONS: dict[str, Callable[..., None]] = {
    "noise": noise,
    "evolution_strategies": evolution_strategies,
}
