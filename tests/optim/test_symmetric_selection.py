"""Which backend is chosen, and how the choice is kept for all processes of a machine."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock

from torchtitan_dmuon.optim.symmetric_matmul import selection, store
from torchtitan_dmuon.optim.symmetric_matmul.backend import Problem, Shape
from torchtitan_dmuon.optim.symmetric_matmul.identity import identity
from torchtitan_dmuon.optim.symmetric_matmul.plain import product
from torchtitan_dmuon.optim.symmetric_matmul.selection import Selector
from torchtitan_dmuon.optim.symmetric_matmul.store import Choice, Store
from torchtitan_dmuon.optim.symmetric_matmul.timing import MAX_ROUNDS, race

CPU = torch.device("cpu")
PROBLEM = Problem("gram", True, None, 256, 32, 256, torch.float32, "rc")
NAMES = frozenset({"plain", "first", "second"})


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small products wait for busy cores otherwise."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Clock:
    """Time that only backends make pass."""

    def __init__(self) -> None:
        self.now = 0.0

    def watch(self, call: Callable[[], torch.Tensor], device: torch.device) -> Callable[[], float]:
        def once() -> float:
            start = self.now
            call()
            return self.now - start

        return once


class Fake:
    """A backend that takes a given time, and may be off, raise, or get its result wrong."""

    any_product = False

    def __init__(
        self,
        clock: Clock,
        name: str,
        seconds: float,
        spoil: Callable[[torch.Tensor], torch.Tensor] = lambda x: x,
        made_of_plain: bool = False,
    ) -> None:
        self.name = name
        self.made_of_plain = made_of_plain
        self.off: str | None = None
        self.rows: list[int] = []
        self._clock, self._seconds, self._spoil = clock, seconds, spoil

    def unavailable(self, device: torch.device, dtype: torch.dtype, shape: Shape) -> str | None:
        return self.off

    def broken(self) -> str | None:
        return None

    def __call__(self, a: Any, b: Any, c: Any, alpha: float, beta: float) -> torch.Tensor:
        self.rows.append(a.size(-2))
        self._clock.now += self._seconds * a.size(-2) / b.size(-1)
        return self._spoil(product(a, b, c, alpha, beta))


def fakes(*seconds: float, clock: Clock | None = None) -> tuple[Clock, list[Fake]]:
    clock = clock or Clock()
    names = ("plain", "first", "second")
    return clock, [
        Fake(clock, n, s, made_of_plain=n == "plain") for n, s in zip(names, seconds, strict=False)
    ]


def chosen(backends: Sequence[Fake], clock: Clock, folder: Path, **kwargs: Any) -> str:
    problem = kwargs.get("problem", PROBLEM)
    return Selector(backends, folder, clock.watch).choose(problem, CPU).name


def only_file(folder: Path) -> Path:
    (path,) = folder.glob("*.json")
    return path


@pytest.mark.parametrize(
    ("seconds", "winner"),
    [
        ((1.0, 0.5, 0.7), "first"),
        ((1.0, 0.8, 0.7), "second"),
        ((1.0, 1.1, 1.2), "plain"),
        ((1.0, 0.98, 1.2), "plain"),
        ((1.0, 0.96, 1.2), "first"),
    ],
)
def test_the_fastest_is_chosen_if_it_beats_plain_by_more_than_noise(
    seconds: tuple[float, ...], winner: str, tmp_path: Path
) -> None:
    """Two percent are not worth another order of additions; four are."""
    clock, backends = fakes(*seconds)
    assert chosen(backends, clock, tmp_path) == winner
    (choice,) = json.loads(only_file(tmp_path).read_text())["choices"].values()
    assert choice["seconds"] == pytest.approx(
        dict(zip(("plain", "first", "second"), seconds, strict=True))
    )


def one_row(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x[100, :16] = x[101, :16]
    return x


def fail(x: torch.Tensor) -> torch.Tensor:
    raise ValueError("no kernel\nimage")


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (one_row, "error of a row 0."),
        (lambda x: x * 1.001, "error of a row 1.0e-03, allowed"),
        (lambda x: x.tril(), "error of a row"),
        (lambda x: x.index_fill(0, torch.tensor([3]), float("nan")), "error of a row not finite"),
        (lambda x: x.double(), "returns (256, 256) torch.float64 where (256, 256) torch.float32"),
        (lambda x: x[:-1], "returns (255, 256)"),
        (fail, "ValueError: no kernel image"),
    ],
    ids=["16 elements", "factor", "not mirrored", "nan", "dtype", "shape", "raises"],
)
def test_a_backend_that_is_wrong_or_fails_is_dropped_with_the_reason(
    spoil: Any, reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """However fast it is; the reason is logged once, and stays in the record."""
    clock, (plain, second) = fakes(1.0, 0.9)
    bad = Fake(clock, "second", 0.1, spoil)
    assert chosen([plain, second, bad], clock, tmp_path) == "first"
    record = json.loads(only_file(tmp_path).read_text())["choices"][PROBLEM.key]
    assert reason.replace("0.", "") in record["dropped"]["second"]
    assert "second" not in record["seconds"]
    (warning,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert "second is not used for gram+c 256x32 float32" in warning
    caplog.clear()
    assert chosen([plain, second, bad], clock, tmp_path) == "first" and not caplog.records


def test_a_slow_16_bit_product_is_not_run_whole(tmp_path: Path) -> None:
    """Where a CPU has no units for it, a plain product of a large model's matrix takes minutes."""
    problem = Problem("gram", False, None, 512, 16, 512, torch.bfloat16, "rc")
    for seconds, whole in ((30.0, False), (2.0, True)):
        clock, (plain, fast) = fakes(seconds, 1.0)
        parts = Fake(clock, "second", seconds / 2, made_of_plain=True)
        folder = tmp_path / str(seconds)
        assert chosen([plain, fast, parts], clock, folder, problem=problem) == "first"
        assert (512 in plain.rows, 512 in parts.rows) == (whole, whole)
        record = json.loads(only_file(folder).read_text())["choices"][problem.key]
        assert ("plain" in record["seconds"]) == whole
        assert whole or "takes about 30 s" in record["dropped"]["plain"]


def test_a_race_ends_in_time_and_ignores_disturbances() -> None:
    """Times are the least of several in turns, and losers and long products run rarely."""
    runs = {"a": 0, "b": 0, "slow": 0}

    def entrant(name: str, seconds: float, disturbed: int) -> Callable[[], float]:
        def once() -> float:
            runs[name] += 1
            return seconds + (0.002 if runs[name] == disturbed else 0.0)

        return once

    times = race(
        {
            "a": entrant("a", 0.001, 1),
            "b": entrant("b", 0.0012, 2),
            "slow": entrant("slow", 0.01, 0),
        }
    )
    assert times == {"a": 0.001, "b": 0.0012, "slow": 0.01}
    assert runs["slow"] == 3 and runs["a"] == MAX_ROUNDS
    runs = {"a": 0, "b": 0}
    race({"a": entrant("a", 20.0, 0), "b": entrant("b", 30.0, 0)})
    assert runs == {"a": 1, "b": 1}


def test_a_stored_backend_that_is_off_now_is_measured_anew(tmp_path: Path) -> None:
    """A file from before an uninstallation does not stop a job, and is brought up to date."""
    clock, backends = fakes(1.0, 0.5, 0.7)
    assert chosen(backends, clock, tmp_path) == "first"
    backends[1].off = "uninstalled"
    assert chosen(backends, clock, tmp_path) == "second"
    backends[1].off = None
    assert chosen(backends, clock, tmp_path) == "second"


def test_with_plain_alone_nothing_is_measured(tmp_path: Path) -> None:
    """No file, no time, and no error inside the capture of a graph."""
    clock, (plain, other) = fakes(1.0, 0.5)
    other.off = "off"
    assert chosen([plain, other], clock, tmp_path / "new") == "plain"
    assert not plain.rows and not (tmp_path / "new").exists()


def test_inside_a_capture_there_is_no_choosing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measuring there would end up in the graph: the error says what to do."""
    clock, backends = fakes(1.0, 0.5)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="captured, where it can not be measured; call it once"):
        Selector(backends, tmp_path, clock.watch).choose(PROBLEM, torch.device("cuda", 0))


def test_without_memory_to_measure_this_process_goes_on_plainly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A full GPU does not stop a job, and decides nothing for other runs."""

    def full(x: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("full")

    clock, (plain, _) = fakes(1.0, 0.5)
    selector = Selector([plain, Fake(clock, "first", 0.5, full)], tmp_path / "new", clock.watch)
    for _ in range(2):
        assert selector.choose(PROBLEM, CPU).name == "plain"
    assert len(caplog.records) == 1 and "not enough free memory" in caplog.text
    assert not (tmp_path / "new").exists()
    assert selector.choices(CPU)[PROBLEM.key].seconds == {}


GOOD = Choice("first", {"plain": 1.0, "first": 0.5}, {"second": "error"}).as_json()


def file_text(made_for: Any, **changes: Any) -> str:
    return json.dumps({"format": 1, "made_for": made_for, "choices": {PROBLEM.key: GOOD}} | changes)


def with_entry(**changes: Any) -> dict[str, Any]:
    return {"choices": {PROBLEM.key: GOOD | changes}}


BAD_FILES: dict[str, Callable[[Any], Any]] = {
    "empty": lambda made_for: "",
    "cut": lambda made_for: file_text(made_for)[:-20],
    "binary": lambda made_for: b"\xff\xfe\x00",
    "nested": lambda made_for: "[" * 100_000,
    "list": lambda made_for: "[]",
    "format": lambda made_for: file_text(made_for, format=0),
    "device": lambda made_for: file_text({**made_for, "torch": "1.0"}),
    "no table": lambda made_for: file_text(made_for, choices=[]),
    "entry": lambda made_for: file_text(made_for, choices={PROBLEM.key: "first"}),
    "unknown": lambda made_for: file_text(made_for, **with_entry(backend="tpu")),
    "untimed": lambda made_for: file_text(made_for, **with_entry(backend="second")),
    "types": lambda made_for: file_text(made_for, **with_entry(seconds={"first": "fast"})),
    "nan": lambda made_for: file_text(made_for, **with_entry(seconds={"first": float("nan")})),
    "bool": lambda made_for: file_text(made_for, **with_entry(seconds={"first": True})),
    "huge": lambda made_for: file_text(made_for, **with_entry(seconds={"first": 10**400})),
    "no name": lambda made_for: file_text(made_for, **with_entry(backend=["first"])),
    "escape": lambda made_for: file_text(made_for, **with_entry(dropped={"second": "\x1b[2J"})),
    "reason": lambda made_for: file_text(made_for, **with_entry(dropped={"second": 3})),
}


@pytest.mark.parametrize("kind", BAD_FILES)
def test_a_corrupt_or_foreign_file_is_ignored_once_and_replaced(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing on disk can stop a job or choose a kernel that was not measured here."""
    clock, backends = fakes(1.0, 0.9, 0.5)
    selector = Selector(backends, tmp_path, clock.watch)
    path = selector.store(CPU).path
    bad = BAD_FILES[kind](identity(CPU))
    path.write_bytes(bad if isinstance(bad, bytes) else bad.encode())
    state = selector.store(CPU).read()[1]
    assert state.startswith(("corrupt", "unreadable"))
    assert selector.choose(PROBLEM, CPU).name == "second"
    assert selector.choose(PROBLEM, CPU).name == "second"
    (warning,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert str(path) in warning and "ignored" in warning
    assert selector.store(CPU).read()[1] == "ok"
    path.write_text(file_text(identity(CPU)))
    assert chosen(backends, clock, tmp_path) == "first"  # As is, the file is a good one.


def test_the_first_to_write_decides(tmp_path: Path) -> None:
    """Two that measured differently end with one choice: results are the same in both."""
    clock, backends = fakes(1.0, 0.5, 0.7)
    one = Selector(backends, tmp_path, clock.watch)
    other_clock, others = fakes(1.0, 0.7, 0.5)

    class Late(Store):
        """The other process writes after this one has looked, and before it writes."""

        def add(self, *arguments: Any) -> Choice:
            Selector(others, tmp_path, other_clock.watch).choose(PROBLEM, CPU)
            return super().add(*arguments)

    one._stores[CPU] = Late(tmp_path, identity(CPU), NAMES)
    assert one.choose(PROBLEM, CPU).name == "second"
    assert one.choices(CPU)[PROBLEM.key].seconds["second"] == 0.5


def _write_keys(folder: Path, name: str, start: Any, results: Any) -> None:
    kept = Store(folder, {"device": "x"}, NAMES)
    start.wait()
    mine = Choice(name, {name: 1.0})
    results.put([kept.add(f"key {i}", mine, NAMES.__contains__).backend for i in range(10)])


def test_many_processes_agree(tmp_path: Path) -> None:
    """Six at once on ten shapes: one whole file, and each shape has one winner for all."""
    context = multiprocessing.get_context("fork")
    start, results = context.Barrier(6, timeout=60), context.Queue()
    workers = [
        context.Process(
            target=_write_keys, args=(tmp_path, ("first", "second")[i % 2], start, results)
        )
        for i in range(6)
    ]
    for worker in workers:
        worker.start()
    answers = [results.get(timeout=60) for _ in workers]
    for worker in workers:
        worker.join(timeout=60)
        assert worker.exitcode == 0
    assert all(answer == answers[0] for answer in answers)
    choices, state = Store(tmp_path, {"device": "x"}, NAMES).read()
    assert state == "ok"
    assert [choices[f"key {i}"].backend for i in range(10)] == answers[0]
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".lock"}


def test_a_write_that_dies_leaves_the_file_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old content stays, and what a killed process left is cleared by the next writer."""
    kept = Store(tmp_path, {"device": "x"}, NAMES)
    kept.add("a", Choice("first", {"first": 1.0}), NAMES.__contains__)
    before = kept.path.read_bytes()
    with monkeypatch.context() as patched:

        def die(*arguments: Any) -> None:
            raise KeyboardInterrupt

        patched.setattr(os, "replace", die)
        with pytest.raises(KeyboardInterrupt):
            kept.add("b", Choice("second", {"second": 1.0}), NAMES.__contains__)
    assert kept.path.read_bytes() == before
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".lock"}
    leftover = tmp_path / f".{kept.path.stem}.killed.tmp"
    leftover.write_text("{")
    kept.add("b", Choice("second", {"second": 1.0}), NAMES.__contains__)
    assert set(kept.read()[0]) == {"a", "b"} and not leftover.exists()
    assert kept.path.stat().st_mode & 0o077 == 0


def test_a_folder_that_can_not_be_written_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The choice holds for the process; nothing is measured again in it."""
    (tmp_path / "file").write_text("")
    clock, backends = fakes(1.0, 0.5)
    selector = Selector(backends, tmp_path / "file" / "folder", clock.watch)
    other = Problem("gram", True, None, 256, 40, 256, torch.float32, "rc")
    for problem in (PROBLEM, other):
        assert selector.choose(problem, CPU).name == "first"
    spent = clock.now
    assert selector.choose(PROBLEM, CPU).name == "first" and clock.now == spent
    warnings = [r for r in caplog.records if "can not be kept on disk" in r.getMessage()]
    assert len(warnings) == 1


def test_a_lock_that_is_never_released_does_not_stop_a_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The wait has a bound, and the choice then holds for the process."""
    monkeypatch.setattr(store, "LOCK_TIMEOUT_SECONDS", 0.05)
    kept = Store(tmp_path, {"device": "x"}, NAMES)
    mine = Choice("first", {"first": 1.0})
    with FileLock(kept.path.with_suffix(".lock")):
        assert kept.add("a", mine, NAMES.__contains__) is mine
        assert "has held" in caplog.text and kept.read()[1] == "absent"
        # Once is enough: the next shape does not wait again.
        start = time.perf_counter()
        monkeypatch.setattr(store, "LOCK_TIMEOUT_SECONDS", 60.0)
        assert kept.add("b", mine, NAMES.__contains__) is mine
        assert time.perf_counter() - start < 5


def test_files_differ_by_device_libraries_and_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was fastest with 2 threads or another torch says nothing about this run."""
    here = identity(CPU)
    assert here["threads"] == str(torch.get_num_threads()) and here["torch"] == torch.__version__
    paths = {
        Store(tmp_path, {**here, key: "other"}, NAMES).path
        for key in ("device", "threads", "torch")
    }
    assert len(paths | {Store(tmp_path, here, NAMES).path}) == 4
    for name, value in {
        "get_device_name": lambda device: "NVIDIA H100 80GB HBM3",
        "get_device_capability": lambda device: (9, 0),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    gpu = identity(torch.device("cuda", 0))
    assert gpu["units"] == "sm_90" and {"quack-kernels", "nvidia-cutlass-dsl"} <= set(gpu)
    assert Store(tmp_path, gpu, NAMES).path.name.startswith("NVIDIA-H100-80GB-HBM3-")


def test_a_gram_matrix_is_told_from_a_square() -> None:
    """X X^T reads one operand; R R, of a symmetric R, is as any product of two."""
    x = torch.ones(4, 4)
    assert Problem.of(x, x.mT, None, symmetric=True).kind == "gram"
    assert Problem.of(x, x, x, symmetric=True).kind == "product"
    assert Problem.of(x, x.mT, None, symmetric=False).kind == "any"


def test_keys_tell_all_problems_apart() -> None:
    """No two problems share an entry."""
    problems = [
        Problem(kind, c, batch, m, k, n, dtype, layouts)  # type: ignore[arg-type]
        for kind in ("gram", "product", "any")
        for c in (False, True)
        for batch in (None, 1, 2)
        for m, k, n in ((256, 25, 625), (2562, 5, 625), (256, 256, 25))
        for dtype in (torch.float16, torch.bfloat16)
        for layouts in ("rc", "rr")
    ]
    symmetric = [p for p in problems if p.kind == "any" or p.n == 625]
    assert len({p.key for p in symmetric}) == len(symmetric)
    assert selection.MIN_SYMMETRIC_SIZE == 256
