"""scripts/device_check.sh without a GPU: its bounds, its report, and how it judges figures."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.bounded_parts import dies, good, hangs, raises
from torchtitan_dmuon.bench import newton_schulz as bench
from torchtitan_dmuon.bench.bounded import (
    CUT_OFF,
    NO_TIME,
    Budget,
    Context,
    Part,
    Report,
    execute,
    run_parts,
    write_json,
)
from torchtitan_dmuon.native import cuda as native_cuda
from torchtitan_dmuon.optim.symmetric_matmul import backends
from torchtitan_dmuon.optim.symmetric_matmul.plain import Plain

ROOT = Path(__file__).resolve().parent.parent
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def check() -> ModuleType:
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("device_check", ROOT / "scripts/device_check.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def _report(path: Path, clock: Clock, seconds: float = 100.0) -> tuple[Report, Budget]:
    budget = Budget(seconds, clock)
    return Report(path, budget, {"rehearsal": True}), budget


def _gone(pid: int) -> bool:
    """Whether a process has ended; an orphan may wait for its new parent to notice."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--minutes", "0"], "--minutes: expected a number from 5 to 60, got 0"),
        (["--output", "x.txt"], '--output: expected a file that ends in .json, got "x.txt"'),
        (["--output", "nowhere/x.json"], "--output: no such folder: "),
        ([], "needs a CUDA GPU (found none); --rehearse runs the same parts on the CPU at toy"),
    ],
)
def test_mistakes_and_a_missing_gpu_are_one_line(
    arguments: list[str],
    message: str,
    check: ModuleType,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Nothing is started or written without a GPU or with a bad option; status 2."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert check.main(arguments) == 2
    said = capsys.readouterr()
    assert said.err.startswith(f"error: {message}") and said.err.count("\n") == 1
    assert said.out == "" and not list(tmp_path.iterdir())


def test_a_part_gets_what_later_ones_do_not_need() -> None:
    """The time is shared so that a slow part can not use up the least of those that follow."""
    clock = Clock()
    budget = Budget(100, clock)
    assert budget.bound(least=10, later=30) == 70
    clock.now += 65
    assert budget.bound(least=10, later=30) == 10  # its own least comes before theirs
    assert budget.bound(least=10, later=0) == 35
    clock.now += 26
    assert budget.bound(least=10, later=0) is None
    assert budget.bound(least=9, later=50) == 9


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    """A part without time is in the report with that reason, and one that still fits runs."""
    clock = Clock()
    report, budget = _report(tmp_path / "r.json", clock)
    bounds = {}

    def run(part: Part, context: Context) -> None:
        bounds[part.name] = context.seconds
        clock.now += 70
        report.set(part.name, ok=True)

    parts = [Part("a", good, 20), Part("b", good, 40), Part("c", good, 5)]
    run_parts(parts, Context(True, tmp_path, 0), report, budget, run)
    assert bounds == {"a": 55, "c": 30}
    written = json.loads((tmp_path / "r.json").read_text())
    assert written["parts"]["b"] == {
        "ok": False, "reason": NO_TIME, "seconds": 0.0, "bound_seconds": None, "results": {},
    }  # fmt: skip
    assert written["finished"] and written["seconds"] == 140


def test_a_run_that_is_cut_off_leaves_what_it_had(tmp_path: Path) -> None:
    """Ctrl-C or the outer time-out: done parts stay, the others are named, it is not finished."""
    report, budget = _report(tmp_path / "r.json", Clock())

    def run(part: Part, context: Context) -> None:
        if part.name == "b":
            raise KeyboardInterrupt
        report.set(part.name, ok=True, results={"x": 1})

    with pytest.raises(KeyboardInterrupt):
        parts = [Part(name, good, 1) for name in "abc"]
        run_parts(parts, Context(True, tmp_path, 0), report, budget, run)
    written = json.loads((tmp_path / "r.json").read_text())
    assert written["parts"]["a"]["results"] == {"x": 1}
    assert written["parts"]["c"]["reason"] == CUT_OFF
    assert written["finished"] is False


@pytest.mark.timeout(90)
def test_parts_that_fail_die_or_hang_cost_only_themselves(tmp_path: Path) -> None:
    """The report has the reason and what each found before; what a part started is ended."""
    report, _ = _report(tmp_path / "r.json", Clock())
    log = tmp_path / "r.log"
    for run, bound in ((raises, 60), (hangs, 5), (dies, 60), (good, 60)):
        # 5: long enough to start a Python and to note something.
        execute(Part(run.__name__, run, 1), Context(True, tmp_path, bound), report, log)
    parts = json.loads((tmp_path / "r.json").read_text())["parts"]
    assert {name: entry["ok"] for name, entry in parts.items()} == {
        "raises": False, "hangs": False, "dies": False, "good": True,
    }  # fmt: skip
    assert parts["raises"]["reason"] == "ValueError: no such kernel"
    assert parts["raises"]["results"] == {"before": 1}
    assert "in raises" in log.read_text()
    assert parts["hangs"]["reason"] == "not done within 5 s; ended"
    assert parts["hangs"]["results"]["before"] == 3
    assert _gone(parts["hangs"]["results"]["pid"])
    assert parts["dies"]["reason"] == "its process ended with status 77; see r.log"
    assert parts["dies"]["results"] == {"before": 2}
    assert parts["good"]["results"] == {"figure": "nan"}


def test_a_report_is_replaced_whole(tmp_path: Path) -> None:
    """A failure while writing leaves the report before it, and no litter."""
    path = tmp_path / "r.json"
    write_json(path, {"a": math.inf})
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": "inf"}
    assert [p.name for p in tmp_path.iterdir()] == ["r.json"]


@pytest.mark.parametrize(
    ("rows", "over_floor", "ratios", "expected"),
    [
        (2048, 1.3, [1.0, 1.7], {"floor": "met", "reference": "met"}),
        (2048, 1.31, [1.2, 0.99], {"floor": "missed", "reference": "missed"}),
        (2047, 5.0, [], {"floor": "not asked for", "reference": "not measured"}),
    ],
)
def test_goals(rows: int, over_floor: float, ratios: list[float], expected: dict[str, str]) -> None:
    """At most 1.3 times the floor from 2048 rows on, and no form of the reference is faster."""
    entry: dict[str, Any] = {"rows": rows, "columns": 8192, "over_floor": over_floor}
    entry |= {f"reference {i}": {"over_ours": ratio} for i, ratio in enumerate(ratios)}
    entry["torch.optim.Muon"] = {"over_ours": 0.5}
    assert bench.goals(entry) == expected
    assert bench.tally([{**entry, "goals": expected}, {}])["floor"] == {expected["floor"]: 1}


def test_a_candidate_that_fails_does_not_end_the_contest() -> None:
    """The others are timed, and the row says why it is missing."""

    def broken(matrix: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no image\nfor sm_90")

    runs = {"ours": bench.ours_in(torch.float32), "broken": broken}
    times, failed = bench.contest(runs, torch.ones(8, 16), 2)
    assert list(times) == ["ours"] and len(times["ours"]) == 2
    assert failed == {"broken": "RuntimeError: no image for sm_90"}


def test_shapes_are_timed_with_every_candidate() -> None:
    """A row has ours, plain products, torch's and the reference, all of which give a factor."""
    entry = bench.time_shape((16, 48), CPU, 1e9, 1)
    names = {"plain products", "torch.optim.Muon", "reference in our graph, cuBLAS"}
    assert {name for name, value in entry.items() if "over_ours" in str(value)} == names
    assert entry["failed"] == {"reference in our graph, kernels": "for CUDA GPUs only"}
    assert entry["goals"]["floor"] == "not asked for" and entry["replayed"] is False
    matrix = bench.seeded((16, 48), CPU)
    others, _ = bench.reference(CPU, compiled=False)
    plain = bench.plain_in(torch.float16)(matrix).float()
    for result in (bench.ours_in(torch.float32)(matrix), *(run(matrix) for run in others.values())):
        assert (plain - result.float()).abs().max() < 0.02


def test_errors_are_told_as_multiples_of_plains() -> None:
    """Backends that are right stay within the limit; a stale tile, or an exception, is found."""

    class Stale(Plain):
        name = "stale"

        def __call__(self, *arguments: Any) -> torch.Tensor:
            result = super().__call__(*arguments)
            result[-8:, :8] = 0
            return result

    class Raises(Plain):
        name = "raises"

        def __call__(self, *arguments: Any) -> torch.Tensor:
            raise RuntimeError("illegal address")

    problems = bench.symmetric_problems([(128, 320), (320, 128), (128, 128)], torch.float32)
    assert len(problems) == 4  # two layouts of 128 x 320, 128 x 128, and one polynomial
    for problem in problems:
        entry = bench.symmetric_errors(problem, CPU, [*backends(), Stale(), Raises()])
        found = entry["backends"]
        assert found["panels4"]["ok"] and 0.1 < found["panels4"]["rms_ratio"] < 4
        assert not found["stale"]["ok"] and found["stale"]["rms_ratio"] > 100
        assert found["raises"] == {"failed": "RuntimeError: illegal address"}
        assert found["quack"] == {"off": "for CUDA GPUs only"}
        assert 0 < entry["plain"]["rms"] < 1e-6


def test_verdicts_on_parts(check: ModuleType) -> None:
    """What makes a part not ok: a failed test, none run, an inexact backend, a loss that is off."""
    counts: dict[str, int] = {}
    failures: list[str] = []
    for text in (
        "tests/a.py::test_x[1] PASSED             [ 50%]\n",
        "tests/a.py::test_x[a b] SKIPPED (needs)  [ 60%]\n",
        "tests/a.py::test_y FAILED                [100%]\n",
        "FAILED tests/a.py::test_y - AssertionError: 1\n",
        "==== 1 failed, 1 passed in 3 s ====\n",
    ):
        check.read_test_line(text, counts, failures)
    assert counts == {"passed": 1, "skipped": 1, "failed": 1}
    assert failures == ["FAILED tests/a.py::test_y - AssertionError: 1"]
    assert check.judge_tests(1, counts, rehearse=False)[0] is False
    assert check.judge_tests(0, {"skipped": 3}, rehearse=False) == (False, "no test ran to its end")
    assert check.judge_tests(0, {"passed": 1}, rehearse=False) == (True, "")
    entry = {"problem": "gram", "backends": {"quack": {"ok": True}, "cute": {"off": "why"}}}
    assert check.judge_backends([entry]) == (True, "")
    entry["backends"]["quack"] = {"failed": "why"}
    assert check.judge_backends([entry]) == (False, "failed or not exact enough: quack for gram")
    assert check.judge_training(0, [11.9, 11.8], 2) == (True, "")
    assert check.judge_training(0, [11.9], 2)[0] is False
    assert check.judge_training(0, [11.9, math.nan], 2)[0] is False
    assert check.judge_training(1, [11.9, 11.8], 2)[0] is False
    found = {"shm": {"seconds": 1.0}, "gin": {"off": "NCCL is old"}}
    assert check.judge_libraries(found) == (True, "gin is off: NCCL is old")
    found["loopback"] = {"failed": "no nvcc"}
    assert check.judge_libraries(found) == (False, "loopback: no nvcc; gin is off: NCCL is old")


def test_libraries_of_a_gpu_name_what_they_lack(
    check: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without NCCL's wheel gin is off; without a compiler the rest has failed, with the reason."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(native_cuda, "distribution", _missing)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = {
        name: check.made(make)
        for name, make in check.libraries(Context(False, tmp_path, 60)).items()
        if name in ("loopback", "gin")
    }
    assert "nvidia-nccl-cu13: not installed" in found["gin"]["off"]
    assert "nvcc: not on PATH" in found["loopback"]["failed"]


def _missing(name: str) -> None:
    raise native_cuda.PackageNotFoundError(name)


@pytest.mark.long
def test_rehearsal(tmp_path: Path, check: ModuleType) -> None:
    """All parts run on the CPU, every one is ok, and all keys of the report are documented."""
    command = [sys.executable, str(ROOT / "scripts/device_check.py"), "--rehearse"]
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "NGPU")}
    done = subprocess.run(
        command,
        check=False,
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    report = json.loads((tmp_path / "device_check.json").read_text())
    reasons = {name: entry["reason"] for name, entry in report["parts"].items()}
    assert done.returncode == 0, (reasons, done.stderr)
    assert report["rehearsal"] is True and report["finished"] is True
    assert list(report["parts"]) == [part.name for part in check.PARTS]
    assert set(report) | {f"parts.*.{key}" for key in report["parts"]["csrc"]} <= set(check.KEYS)
    results = {name: entry["results"] for name, entry in report["parts"].items()}
    assert results["environment"]["doctor"]["problems"] == []
    assert set(results["csrc"]) == {"shm", "allocator", "loopback"}
    assert all(entry["seconds"] >= 0 for entry in results["csrc"].values())
    assert results["gpu_tests"]["counts"]["skipped"] > 0
    assert all(entry["backends"] for entry in results["backends"]["entries"])
    assert len(results["newton_schulz"]["shapes"]) == len(check.TOY_SHAPES)
    assert len(results["training"]["losses"]) == 3


@pytest.mark.long
def test_the_real_job_is_a_valid_one(tmp_path: Path, check: ModuleType) -> None:
    """What the launcher gets on a GPU passes every check that needs none, on one rank."""
    from torchtitan_dmuon.config.checks import check as check_job
    from torchtitan_dmuon.config.manager import load_job

    job = load_job(check.training_arguments(Context(False, tmp_path, 60)))
    check_job(job, 1, "cuda")
    assert (job.config.parallelism.mode, job.config.model.flavor) == ("owner", "0.5B")
    assert job.config.training.mixed_precision_param == "bfloat16"
