"""`python -m benchmarks` lists its parts, tries one, and replaces a table and nothing else of a page."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from benchmarks import __main__ as benchmarks
from benchmarks.__main__ import PARTS, Part, measure, overhead_table
from benchmarks.language import METHODS, show, steps_to
from benchmarks.page import ROOT, Pieces, has_table, print_head, print_row, write_table
from benchmarks.two_hosts import HOSTS, TIMEOUT_S, Link, started

from tests.namespaces import hosts, needs_namespaces

PAGE = "before\n<!-- benchmark: one -->\nold\n<!-- end of one -->\nafter\n"


def command(*words: str, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.run(
        [sys.executable, "-m", "benchmarks", *words],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def test_every_part_has_a_module_and_a_place_on_its_page() -> None:
    """Each part that `--list` names is a module of benchmarks/, and its page has its two markers, once."""
    listed = command("--list").stdout.splitlines()
    assert [line.split()[0] for line in listed] == [part.name for part in PARTS]
    for part in PARTS:
        assert (ROOT / "benchmarks" / f"{part.command.split()[0]}.py").is_file()
        assert has_table(ROOT / "docs" / part.page, part.name), part.name


def test_a_quick_part_prints_a_table_and_writes_nothing() -> None:
    """`--quick start` measures real commands under the header of its table on the page, which stays."""
    page = ROOT / "docs" / "performance.md"
    before = page.read_bytes()
    done = command("start", "--quick")
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.splitlines() if line.startswith("| `ddprun")]
    assert len(rows) == 4
    assert next(line for line in done.stdout.splitlines() if line.startswith("|")).encode() in before
    assert all(float(row.split(" | ")[1]) > 0.02 for row in rows)
    assert page.read_bytes() == before


def test_an_unknown_part_is_refused() -> None:
    """The message names the parts there are; exit code 2."""
    done = command("hook")
    assert done.returncode == 2
    assert "no part hook; there are overhead, hooks," in done.stderr


def test_only_what_is_between_the_markers_is_replaced(tmp_path: Path) -> None:
    """Text before and after stays; a second table takes the place of the first; markers have to be there."""
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    for table in ("| first |", "| second |"):
        write_table(page, "one", f"{table}\n")
        begin, rest = "before\n<!-- benchmark: one -->", "<!-- end of one -->\nafter\n"
        assert page.read_text() == f"{begin}\n\n{table}\n\n{rest}"
    with pytest.raises(ValueError, match="benchmark: two"):
        write_table(page, "two", "table")


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("import sys; sys.exit('no namespaces')", "exit code 1"),
        ("print('| half |', flush=True); raise SystemExit(1)", "exit code 1"),
        ("import time; print('| half |', flush=True); time.sleep(60)", "ended after 1 s"),
    ],
)
def test_a_part_that_fails_has_no_table(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    body: str,
    told: str,
) -> None:
    """One that cannot run, breaks off or takes too long keeps its old table, and the reason is printed."""
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "broken.py").write_text(body)
    monkeypatch.setattr(benchmarks, "ROOT", tmp_path)
    start = time.monotonic()
    assert measure(Part("broken", "", "broken", "", limit_s=1), quick=False, minutes=None) is None
    assert told in capsys.readouterr().err
    assert time.monotonic() - start < 20


def test_a_measurement_in_pieces_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was measured is not measured again; other settings, or an end, begin anew."""
    monkeypatch.setattr("benchmarks.page.ROOT", tmp_path)
    done: list[str] = []

    def take(pieces: Pieces, key: str) -> list[float]:
        found: list[float] = pieces.take(key, lambda: done.append(key) or [1.5])  # type: ignore[func-returns-value]
        return found

    assert take(Pieces("p", [1], None), "a") == [1.5]
    assert take(Pieces("p", [1], None), "a") == [1.5]
    assert done == ["a"]
    with pytest.raises(SystemExit, match="75"):
        take(Pieces("p", [1], 0.0), "b")
    take(Pieces("p", [2], None), "a")
    assert done == ["a", "a"]
    Pieces("p", [1], None).end()
    take(Pieces("p", [1], None), "a")
    assert done == ["a", "a", "a"]


def test_overhead_is_a_table_with_targets(capsys: pytest.CaptureFixture[str]) -> None:
    """What `overhead.py` prints becomes a row for each model; a ratio below the target is missed."""
    printed = (
        "small: 3.20 ms per step of the hand-written loop\n"
        "  hand-written loop, repeated 1.000 (0.990 to 1.010)\n  ddprun 0.960 (0.950 to 0.970)\n"
        "large: 71.00 ms per step of the hand-written loop\n"
        "  hand-written loop, repeated 1.000 (0.990 to 1.010)\n  ddprun 0.980 (0.970 to 0.990)\n"
    )
    names = ["hand-written loop: ms per step", "hand-written loop, repeated", "ddprun"]
    print_head(["model", *names, "target"])
    again = "1.000 (0.990 to 1.010)"
    print_row(["small", "3.20", again, "0.960 (0.950 to 0.970)", "0.95: reached"])
    print_row(["large", "71.00", again, "0.980 (0.970 to 0.990)", "0.99: missed"])
    assert f"{overhead_table(printed)}\n" == capsys.readouterr().out


@needs_namespaces
@pytest.mark.netns
@pytest.mark.parametrize("link", [Link(20), Link(20, one_way_ms=15)], ids=["rate", "rate and latency"])
def test_a_slow_link_has_its_rate_and_latency(link: Link) -> None:
    """Bytes through a TCP connection take at least as long as the link says, and not much more."""
    if refused := link.refusal():
        pytest.skip(refused)
    size = 2_000_000
    listen = "import socket; s = socket.create_server(('10.77.0.1', 5000)); c = s.accept()[0]"
    receive = f"{listen}\nn = 0\nwhile n < {size}: n += len(c.recv(1 << 20))\nc.sendall(b'!')"
    with hosts(HOSTS) as made, link.between(made):
        server = subprocess.Popen([*made[0].prefix(), sys.executable, "-c", receive])
        try:
            send = (
                "import socket, time\n"
                "for _ in range(100):\n"
                "    try: c = socket.create_connection(('10.77.0.1', 5000)); break\n"
                "    except OSError: time.sleep(0.05)\n"
                "start = time.monotonic()\n"
                f"c.sendall(bytes({size})); c.recv(1); print(time.monotonic() - start)\n"
            )
            done = subprocess.run(
                [*made[1].prefix(), sys.executable, "-c", send],
                capture_output=True,
                text=True,
                timeout=30,
                check=True,
            )
        finally:
            server.kill()
            server.wait()
    least = size * 8 / 20e6 + 2 * link.one_way_ms / 1e3
    assert least * 0.95 <= float(done.stdout) <= 2 * least


@needs_namespaces
@pytest.mark.netns
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < HOSTS, reason="fewer cores than hosts")
def test_hosts_with_their_own_cores_share_none(tmp_path: Path) -> None:
    """Each thread of each rank stays on those of its host."""
    (tmp_path / "p.yaml").write_text(
        "model: {mlp: {inputs: 64, outputs: 10}}\ndata: digits\nloss: cross_entropy\n"
        "optimizer: {sgd: {lr: 0.1}}\nstages: [{train: {steps: 500}}]\n"
    )
    with started(tmp_path, "p.yaml", [], local=2, run_dir="run", warm=True, own_cores=True) as (_, running):
        until = time.monotonic() + 60
        while not (tmp_path / "run" / "steps").is_dir():
            assert time.monotonic() < until, "no steps"
            time.sleep(0.02)
        used = []
        for one in running:
            ranks = one.ranks()
            assert len(ranks) == 2
            threads = [thread for rank in ranks for thread in Path(f"/proc/{rank}/task").iterdir()]
            used.append({core for thread in threads for core in os.sched_getaffinity(int(thread.name))})
        assert all(used)
        assert not set.intersection(*used)
        assert [one.wait(TIMEOUT_S).code for one in running] == [0, 0]


def test_the_files_of_the_language_benchmark_differ_in_their_methods_alone() -> None:
    """So that the same model sees the same samples, at every step."""
    of_methods = {"optimizer", "groups", "sync", "hooks"}
    files = [yaml.safe_load((ROOT / "pipelines" / method.file).read_text()) for method in METHODS]
    common = [{key: value for key, value in file.items() if key not in of_methods} for file in files]
    assert all(one == common[0] for one in common)
    own = [{key: value for key, value in file.items() if key in of_methods} for file in files]
    assert all(one != other for number, one in enumerate(own) for other in own[:number])
    for method, file in zip(METHODS, files, strict=True):
        assert file.get("sync", {}).get("diloco", {"every": 1})["every"] == method.period


@pytest.mark.parametrize(
    ("wanted", "steps"), [(3.0, 100), (2.5, 150), (1.5, 275), (1.0, 300), (0.5, None), (4.0, 100)]
)
def test_steps_to_a_loss_lie_between_two_measurements(wanted: float, steps: float | None) -> None:
    """As the line between them says."""
    assert steps_to([[100, 3.0], [200, 2.0], [250, 2.0], [300, 1.0]], wanted) == steps


def test_the_tables_of_the_language_benchmark(capsys: pytest.CaptureFixture[str]) -> None:
    """A method that is equal to plain DDP, one that reaches its loss with one seed only, and a faster one."""

    def runs(nbytes: int, *losses: list[float]) -> list[dict[str, Any]]:
        return [
            {"bytes": nbytes, "losses": [[200 * (number + 1), loss] for number, loss in enumerate(curve)]}
            for curve in losses
        ]

    plain, equal, slow, fast = METHODS[0], METHODS[1], METHODS[3], METHODS[6]
    found = {
        plain: runs(1000, [3.0, 2.0], [3.0, 2.2]),
        equal: runs(500, [3.0, 2.0, 1.9], [3.0, 2.2, 2.1]),
        slow: runs(100, [3.0, 2.5, 2.0], [3.0, 2.5, 2.3]),
        fast: runs(10, [2.0, 1.8, 1.7], [2.4, 2.0, 1.8]),
    }
    times = {
        plain: {"seconds": [1.0, 4.0], "predicted": [1.0, 4.4], "computing": [0.5, 0.125]},
        equal: {"seconds": [0.5, 2.0], "predicted": [0.5, 2.0], "computing": [0.5, 0.25]},
        slow: {"seconds": [0.2, 0.4], "predicted": [0.2, 0.4], "computing": [0.5, 0.5]},
        fast: {"seconds": [0.4, 0.5], "predicted": [0.3, 0.5], "computing": [0.75, 1.0]},
    }
    show(found, times, 400)
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert rows[1] == "| plain DDP | `language.yaml` | 1,000 | 2.1000 ± 1.2706 | +0.0% | 400 |"
    assert rows[2] == "| fp16 | `language-fp16.yaml` | 500 (1/2) | 2.1000 ± 1.2706 | +0.0% | 400 |"
    assert rows[3].endswith("| 100 (1/10) | 2.5000 ± 0.0000 | +19.3% | 1 of 2 reach it |")
    assert rows[4].endswith("| 10 (1/100) | 1.9000 ± 1.2706 | -9.5% | 250 |")
    assert rows[6] == "| plain DDP | 3.000 | 2.100 |  |"
    assert [row for row in rows if row.startswith("| MuLoCo | 4")] == [
        "| MuLoCo | 400 | 300 (-25%) | 75% | 100 | 4.0 |"
    ]
    assert "| MuLoCo | 500 | 500 (+0%) | 100% | 125 | 12.8 |" in rows
    assert "| DiLoCo | 400 | 400 (+0%) | 50% |  |  |" in rows
