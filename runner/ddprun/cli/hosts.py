"""Commands that compare on several hosts: torchrun's flags by which these meet, and the meeting."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from ddprun import EXIT_FAILURE, EXIT_INTERRUPTED
from ddprun.cli.run import TORCHRUN_FLAGS, FlagValue

if TYPE_CHECKING:
    from ddprun.compare.hosts import ComparisonHosts


def add_rendezvous_flags(command: click.Command) -> click.Command:
    """Add those of torchrun's flags by which several hosts find each other for a comparison."""
    for name in ("rdzv-endpoint", "rdzv-id", "rdzv-conf", "local-addr"):
        kind, text = TORCHRUN_FLAGS[name]
        command.params.append(click.Option([f"--{name}"], type=kind, help=text))
    return command


def rendezvous_flags(flags: Mapping[str, FlagValue], hosts: int) -> dict[str, str] | None:
    """Torchrun's flags by which so many hosts meet for a comparison; None: no endpoint was given.

    Raises:
        click.BadParameter: the endpoint is none, or there is one host.
    """
    from ddprun.host.network import host_and_port

    if (endpoint := flags["rdzv_endpoint"]) is None:
        return None
    if hosts == 1:
        raise click.BadParameter("there is one host: name more with --nnodes", param_hint="--rdzv-endpoint")
    try:
        host_and_port(str(endpoint))
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--rdzv-endpoint") from None
    given = {name: str(value) for name, value in flags.items() if value is not None}
    return {"nnodes": str(hosts), **given}


def run_on_all_hosts(
    command: str, flags: Mapping[str, str], inputs: Sequence[Any], work: Callable[["ComparisonHosts"], int]
) -> int:
    """Meet the other hosts, which run the same command, and do this host's part; gives the exit code.

    `inputs` must be the same on all, and go into JSON. `work` gives the exit code; that of the first host is
    told to the others at the end.
    """
    from ddprun.compare.hosts import ComparisonHosts, HostMessage, HostsError

    hosts, code = None, EXIT_FAILURE
    try:
        hosts = ComparisonHosts(command, flags)
        hosts.check_same_inputs(inputs)
        code = work(hosts)
    except HostsError as error:
        click.echo(f"ddprun {command}: {error}", err=True)
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    finally:
        if hosts is not None:
            if hosts.is_first:
                hosts.send_to_others(HostMessage(end=code))
            hosts.wait_for_all_to_leave()
    return code
