"""What the dispatcher has done beside the hooks."""

import ddprun_hooks
from tests.hooks.test_standalone import loss_of, start
from tests.ranks import as_processes


def sent_meanwhile() -> list[list[int]]:
    """Of each backward pass: how many buckets had been sent, each time that something else could be done."""
    model, _ = start()
    handle = ddprun_hooks.register(model, ["fp16"])
    found: list[list[int]] = []

    def meanwhile() -> None:
        assert all(trace.handed_over is not None for trace in handle.traces), "not waited for"
        found[-1].append(len(handle.traces))

    handle.meanwhile = meanwhile
    for step in range(5):
        found.append([])
        loss_of(model, step).backward()  # type: ignore[no-untyped-call]
        found[-1].append(-len(handle.layout))
    return found


def test_there_is_time_for_something_else_once_the_last_bucket_is_sent() -> None:
    """Once in a backward pass whose buckets are known, and not before."""
    for found in as_processes(2, sent_meanwhile):
        buckets = -found[-1][-1]
        assert buckets > 1
        assert found[2:] == [[buckets, -buckets]] * 3
