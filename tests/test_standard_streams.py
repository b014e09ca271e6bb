"""Standard streams that are gone, full or closed: nothing that is said there changes what a process does."""

import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

# The child says in a file how it got on, since its screen is what is broken.
_TOLD = (
    "import sys; from ddprun import standard_streams as streams; streams.protect_standard_streams(); "
    "note = open(sys.argv[1], 'w')\n"
)


def _run(
    told: Path, code: str, shell: str = "", environment: dict[str, str] | None = None
) -> tuple[int, str, str]:
    """Run code with its streams as a shell makes them; gives exit code, what it has noted, and its screen."""
    command = ["bash", "-c", f'"$0" -c "$1" "$2" {shell}', sys.executable, _TOLD + code, str(told)]
    done = subprocess.run(
        command, capture_output=True, timeout=60, env={**os.environ, **(environment or {})}, check=False
    )
    return done.returncode, told.read_text("utf-8"), (done.stdout + done.stderr).decode("utf-8", "replace")


SPEAKS = """
for _ in range(3):
    streams.print_stderr('a message')
    streams.print_stdout('data')
    print('from a data set', flush=True)
    print('a warning', file=sys.stderr, flush=True)
streams.flush_standard_streams()
note.write('went on')
"""


@pytest.mark.parametrize(
    "shell",
    [
        ">/dev/full 2>/dev/full",
        "2>&1 | true",
        "2> >(true) > >(true)",
        ">&-",
        "2>&-",
        "<&- >&- 2>&-",
        "</dev/null 1</dev/null 2</dev/null",
    ],
)
def test_a_process_goes_on_whatever_becomes_of_its_streams(tmp_path: Path, shell: str) -> None:
    code, noted, shown = _run(tmp_path / "noted", SPEAKS, f"{shell}; exit ${{PIPESTATUS[0]}}")
    assert (code, noted) == (0, "went on")
    assert "Traceback" not in shown
    assert "Error" not in shown


def test_a_process_goes_on_when_its_terminal_is_closed(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    waits = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN); sys.stdin.readline()\n"
    process = subprocess.Popen(
        [sys.executable, "-c", _TOLD + waits + SPEAKS, str(tmp_path / "noted")],
        stdin=subprocess.PIPE,
        stdout=theirs,
        stderr=theirs,
    )
    try:
        os.close(theirs)
        os.close(ours)
        process.communicate(b"go\n", timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0
    assert (tmp_path / "noted").read_text() == "went on"


def test_a_file_opened_later_never_gets_the_number_of_a_closed_stream(tmp_path: Path) -> None:
    """C code writes to descriptor 2 whatever is there: a record of the run, a socket."""
    code = f"""
import os
with open({str(tmp_path / "record")!r}, 'w') as record:
    os.write(2, b'from C code')
    note.write(str(record.fileno() > 2))
"""
    assert _run(tmp_path / "noted", code, "2>&-")[:2] == (0, "True")
    assert (tmp_path / "record").read_text() == ""


def test_a_signal_handler_may_speak_while_the_code_below_it_does(tmp_path: Path) -> None:
    """Python's own streams raise "reentrant call" then."""
    speaks = """
import signal, time
signal.signal(signal.SIGALRM, lambda *_: (streams.print_stderr('handler'), print('handler', file=sys.stderr)))
signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
until = time.monotonic() + 0.3
while time.monotonic() < until:
    streams.print_stderr('x' * 5000)
signal.setitimer(signal.ITIMER_REAL, 0)
note.write('went on')
"""
    slow = "2>&1 | (sleep 0.5; cat); exit ${PIPESTATUS[0]}"
    code, noted, shown = _run(tmp_path / "noted", speaks, slow, {"PYTHONUNBUFFERED": ""})
    assert (code, noted) == (0, "went on")
    assert "handler" in shown
    assert "Traceback" not in shown


def test_a_line_goes_out_whole_and_in_one_piece(tmp_path: Path) -> None:
    """Several ranks write to one pipe: lines of one must not be cut by another's."""
    says = """
pieces, write = [], streams.NeverFailingFileIO.write
streams.NeverFailingFileIO.write = lambda self, data: pieces.append(bytes(data)) or write(self, data)
streams.print_stderr('a line of é')
print('two', 'words', file=sys.stderr)
note.write(repr(pieces))
"""
    code, noted, _ = _run(tmp_path / "noted", says, environment={"PYTHONUTF8": "1", "PYTHONUNBUFFERED": ""})
    assert code == 0
    assert noted == repr(["a line of é\n".encode(), b"two words\n"])


def test_what_an_encoding_lacks_is_escaped(tmp_path: Path) -> None:
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    told = "streams.print_stderr(chr(233)); streams.print_stdout(chr(0xdc80)); note.write('went on')"
    code, noted, shown = _run(tmp_path / "noted", told, environment=ascii_only)
    assert (code, noted) == (0, "went on")
    assert sorted(shown.splitlines()) == ["\\udc80", "\\xe9"]


def test_a_full_pipe_that_somebody_has_made_non_blocking_is_waited_for(tmp_path: Path) -> None:
    fills = """
import os
os.set_blocking(2, False)
for _ in range(100):
    streams.print_stderr('y' * 9999)
note.write('went on')
"""
    code, noted, shown = _run(tmp_path / "noted", fills, "2>&1 | (sleep 1; cat); exit ${PIPESTATUS[0]}")
    assert (code, noted) == (0, "went on")
    assert shown.count("y") == 100 * 9999


@pytest.mark.parametrize(
    ("shell", "expected"),
    [(">/dev/full", "No space left on device"), ("| true", "Broken pipe"), ("", "None")],
)
def test_data_that_stdout_did_not_take_is_known(tmp_path: Path, shell: str, expected: str) -> None:
    """A command whose output is all there is to it has failed then."""
    code = """
streams.print_stdout('data' * 9999)
failure = streams.failure_of_stdout()
note.write('None' if failure is None else failure.strerror)
"""
    assert _run(tmp_path / "noted", code, shell)[1] == expected


def test_sigpipe_is_not_what_ends_a_process() -> None:
    """All of the above stands on Python ignoring the signal."""
    assert signal.getsignal(signal.SIGPIPE) is signal.SIG_IGN
