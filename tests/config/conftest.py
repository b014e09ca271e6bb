"""What all tests of the pipeline file share."""

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from ddprun.config import LoadedPipeline, load

# A busy machine is no fault of the reader's; what must be fast has tests of its own, in processor time.
settings.register_profile(
    "ddprun", deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
settings.load_profile("ddprun")

BASE = "model:\n  mlp: {inputs: 64, outputs: 10}\ndata: digits\noptimizer: sgd\n"


@pytest.fixture
def loaded(tmp_path: Path) -> Callable[..., LoadedPipeline]:
    """Write a pipeline's text to a file and load it; `base=True` puts what is required in front."""

    def from_text(text: str, *overrides: str, base: bool = True, name: str = "p.yaml") -> LoadedPipeline:
        path = tmp_path / name
        path.write_text((BASE if base else "") + text)
        return load(path, overrides)

    return from_text
