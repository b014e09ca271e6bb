"""What torch and NCCL are told before any process group is made."""

import os
from unittest import mock

import pytest

from ddprun.engine.worker import set_nccl_environment


@pytest.mark.parametrize(("timeout_s", "heartbeat"), [(600.0, "660"), (8.0, "480")])
def test_torchs_monitor_waits_for_the_watchdogs_report(timeout_s: float, heartbeat: str) -> None:
    """And collectives of all groups start in one order. What is set already holds."""
    with mock.patch.dict(os.environ, clear=True):
        set_nccl_environment(timeout_s)
        assert os.environ["TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"] == heartbeat
        assert os.environ["NCCL_LAUNCH_ORDER_IMPLICIT"] == "1"
        assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "32"
    own = {
        "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "7",
        "NCCL_LAUNCH_ORDER_IMPLICIT": "0",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    }
    with mock.patch.dict(os.environ, own, clear=True):
        set_nccl_environment(timeout_s)
        assert own.items() <= os.environ.items()
