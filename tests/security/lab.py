"""A trusted package that, as real ones do, holds more than what it means to offer."""

import builtins
import functools
import logging
import operator
import os
import subprocess
from os import system as imported_shell
from subprocess import Popen
from typing import Any

from torch import Tensor, nn
from torch.utils.data import TensorDataset

from ddprun_hooks import Communicator, Hook, Payload
from tests.security import lab_parts
from tests.security.lab_parts import *  # noqa: F403

__all__ = ["imported_shell", "lab_parts"]

shell = os.system
same_shell = shell
computed_shell = vars(os)["system"]
run = subprocess.run
execute = builtins.exec
partial_shell = functools.partial(functools.partial(os.system), "true")
opener = builtins.open
popen = Popen
caller = operator.methodcaller("system", "true")
joined = "".join
log = logging.getLogger("lab").info
logger = logging.getLogger("lab")
shown = functools.lru_cache(os.system)
listed = list[int]
number = 7


class Net(nn.Module):
    """What it means to offer."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.layer = nn.Linear(64, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.flatten(1))  # type: ignore[no-any-return]

    @classmethod
    def small(cls) -> "Net":
        return cls(4)

    @staticmethod
    def tiny() -> "Net":
        return Net(2)

    def save(self, path: str) -> None:
        """Writes what an option names."""

    class Inner(nn.Module):
        """A class in a class."""

    runs = os.system
    compile_it = nn.Module.compile


class Derived(Net):
    """Has what its base has."""


one_net = Net()
bound_method = one_net.save
CLASSES = {"Net": Net}
ComputedNet = CLASSES["Net"]


class Process(Popen[bytes]):
    """A class of its own, but no model."""


class Scaled(Hook):
    """A hook."""

    async def __call__(self, payload: Payload, comm: Communicator) -> Tensor:
        return await comm.reduce(payload.tensor)


def make_net() -> nn.Module:
    return Net()


@functools.lru_cache
def made_once(width: int = 8) -> Any:
    return Net(width)


def decorated(function: Any) -> Any:
    @functools.wraps(function)
    def wrapper(*args: Any) -> Any:
        return function(*args)

    return wrapper


wrapped_net = decorated(make_net)
wrapped_shell = decorated(os.system)
wrapped_shell.__module__ = __name__
partial_net = functools.partial(Net, width=10)


_hidden_net = make_net


def count() -> int:
    return 1


def nothing() -> None:
    """Not a model either."""


def samples() -> TensorDataset:
    raise NotImplementedError
