"""What the tests of secrets share with those of the pipeline file."""

from tests.config.conftest import loaded

__all__ = ["loaded"]
