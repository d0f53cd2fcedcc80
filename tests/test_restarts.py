"""Jobs that lose a rank and go on: what the launcher does, and what plain torchrun needs."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed import TCPStore
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.fsdp import fully_shard

from tests.test_launch import SHORT, _ranks_of, _start, _wait_for_step
from tests.test_training import train_job
from tests.worlds import World, run_world
from torchtitan_dmuon import launch, train
from torchtitan_dmuon.config.checks import check
from torchtitan_dmuon.config.errors import ConfigError
from torchtitan_dmuon.config.manager import load_job
from torchtitan_dmuon.lost_rank import awaited

SAVING = ["--checkpoint.enable", "--max_restarts", "1"]


_JOB = ["--config", "debug_owner_hsdp_z3.toml", "--parallelism.data_parallel_shard_degree", "1"]
_JOB += ["--parallelism.owner_cost", "model", *SHORT, "--training.steps", "9"]


def _left_names() -> set[Path]:
    """Return the names of shared memory that stay: jobs of other tests have theirs for a moment."""
    left: set[Path] | None = None
    deadline = time.monotonic() + 30
    while left != set() and time.monotonic() < deadline:
        now = set(Path("/dev/shm").glob(f"dmuon-{os.getuid()}-*"))
        left = now if left is None else left & now
        time.sleep(0.1)
    return left or set()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("starter", "line"),
    [
        ("launcher", "C"),
        pytest.param("launcher", "D", marks=pytest.mark.long),
        pytest.param("torchrun", "C", marks=pytest.mark.long),
    ],
)
def test_a_killed_rank_is_started_again(starter: str, line: str, tmp_path: Path) -> None:
    """With max_restarts the launcher says who failed and from where it goes on, and plain torchrun
    starts again too: every step, the last one included, has the loss of an undisturbed job. Shared
    memory of the killed job has no name."""
    (undisturbed, _) = run_world(2, train_job, [*_JOB, "--dump_folder", str(tmp_path / "whole")])
    job = [*_JOB, "--line", line, "--dump_folder", "out", *SAVING, "--checkpoint.interval", "3"]
    if starter == "launcher":
        started = _start(*job, cwd=tmp_path)
    else:
        program = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        program += ["--nproc-per-node", "2", "--max-restarts", "1", "-m", "torchtitan_dmuon.train"]
        started = _start(*job, cwd=tmp_path, program=program)
    try:
        lines = _wait_for_step(started, 5)
        os.kill(_ranks_of(started)[1], signal.SIGKILL)
        out, err = started.communicate(timeout=200)
    finally:
        if started.poll() is None:
            os.killpg(started.pid, signal.SIGKILL)
    assert started.returncode == 0, err
    if starter == "launcher":
        said = err.splitlines()
        assert said[0] == "error: rank 1 failed first (killed by SIGKILL)"
        assert re.search(r"rank 0 then failed: .*(dmuon \w+ of|waiting for the other ranks)", err)
        restart = re.fullmatch(r"restart 1 of 1: going on from out/checkpoint/step-(\d+)", said[-1])
        assert restart and restart[1] in ("3", "6")
    assert not _left_names()
    found = re.findall(r"step:\s+(\d+)\s+loss:\s+([\d.]+)", "".join(lines) + out)
    assert len(found) > 9, "no step was taken twice"
    wanted = {str(step): f"{loss:.5f}" for step, loss in enumerate(undisturbed, 1)}
    assert all(wanted[step] == loss for step, loss in found), (wanted, found)
    assert found[-1][0] == "9"


@pytest.fixture
def signals() -> Iterator[None]:
    """Put back the handlers that the agent replaces."""
    names = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    before = {name: signal.getsignal(name) for name in names}
    yield
    for name, handler in before.items():
        signal.signal(name, handler)


def _launch(script: str, logs: Path, restarts: int) -> list[tuple[int, dict[int, int]]]:
    """Run two ranks of a script; return number and exit codes of each failure that restarts."""
    heard = []

    def restarting(failures: dict[int, ProcessFailure], number: int) -> None:
        heard.append((number, {rank: f.exitcode for rank, f in failures.items()}))

    logs.mkdir(exist_ok=True)
    cluster = launch.Cluster(1, 0, 2, ":29500", "cpu")
    config = launch._launch_config(cluster, logs, restarts)
    start = "import os, signal, sys, time\nrank, count = (int(os.environ[k]) for k in ('RANK', "
    start += "'TORCHELASTIC_RESTART_COUNT'))\n"
    launch._launch(config, ("-c", start + script), restarting)
    return heard


def test_restarts_hear_what_the_others_have_to_say(signals: None, tmp_path: Path) -> None:
    """A rank that fails because another was killed has time to say so before it is ended, and the
    logs of each attempt stay."""
    script = (
        "print('attempt', count, file=sys.stderr, flush=True)\n"
        "if count < 2 and rank == 1: os.kill(os.getpid(), signal.SIGKILL)\n"
        "if count < 2: time.sleep(1); sys.exit(1)"
    )
    heard = _launch(script, tmp_path / "logs", 3)
    assert heard == [(1, {0: 1, 1: -9}), (2, {0: 1, 1: -9})]
    texts = [p.read_text() for p in sorted(tmp_path.rglob("attempt_*/1/stderr.log"))]
    assert texts == [f"attempt {n}\n" for n in range(3)]


def test_a_hung_rank_does_not_hold_up_a_restart(
    signals: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Last words are waited for a few seconds, not for ever."""
    monkeypatch.setattr(launch, "LAST_WORDS_SECONDS", 0.5)
    script = "if count == 0 and rank == 1: sys.exit(1)\nif count == 0: time.sleep(100)"
    assert _launch(script, tmp_path / "logs", 1) == [(1, {0: -15, 1: 1})]


def test_a_users_error_is_not_tried_again(signals: None, tmp_path: Path) -> None:
    """A rank that ends with status 2 would only find the same mistake again."""
    with pytest.raises(ChildFailedError) as caught:
        _launch("sys.exit(2 if rank else 0)", tmp_path / "logs", 3)
    assert {rank: f.exitcode for rank, f in caught.value.failures.items()} == {1: 2}


def test_the_last_failure_ends_the_job(signals: None, tmp_path: Path) -> None:
    """No restart is left after max_restarts of them."""
    with pytest.raises(ChildFailedError):
        _launch("sys.exit(1)", tmp_path / "logs", 1)
    assert len(list(tmp_path.rglob("attempt_*"))) == 2


def test_a_users_error_of_a_rank_is_one_plain_line() -> None:
    """The class that a rank raised is no concern of the user's."""
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=2, error_file="none")
    failure.message = (
        "Traceback (most recent call last):\n  File ...\n"
        "torchtitan_dmuon.checkpoint.errors.CheckpointError: step-4/__1_0.distcp: damaged: no"
    )
    assert launch._message(failure) == "step-4/__1_0.distcp: damaged: no"


def test_a_restart_says_where_it_goes_on(tmp_path: Path) -> None:
    """The newest complete checkpoint, whatever else lies there."""
    job = load_job(["--dump_folder", str(tmp_path), *SAVING])
    folder = tmp_path / "checkpoint"
    assert launch._start_of_restart(job) == (
        f"there is no complete checkpoint in {folder} yet; it starts from the beginning"
    )
    for name in ("step-8", "step-10", "saving.12", "step-14"):
        (folder / name).mkdir(parents=True)
    for name in ("step-8", "step-10", "saving.12"):
        (folder / name / ".metadata").touch()
    assert launch._start_of_restart(job) == f"going on from {folder / 'step-10'}"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--max_restarts", "-1"], "--max_restarts: expected 0 to"),
        (["--max_restarts", "2"], "expected checkpoint.enable = true, or max_restarts = 0"),
        ([*SAVING, "--checkpoint.load_only"], "expected checkpoint.load_only = false"),
    ],
)
def test_restarts_need_checkpoints(arguments: list[str], expected: str) -> None:
    """A job that would start over, or from the same step each time, is refused at once."""
    with pytest.raises(ConfigError, match=re.escape(expected)):
        check(load_job(arguments), 4, "cpu")


def test_ranks_of_torchruns_next_attempt_meet_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun's store still has the addresses of dead ranks: those of a later attempt agree on
    another one, those of the first do not."""
    agent = TCPStore("localhost", 0, is_master=True, timeout=timedelta(seconds=20))
    ports = []
    for attempt, rank in ((0, 0), (1, 0), (1, 1), (2, 0), (2, 1)):
        monkeypatch.setenv("MASTER_ADDR", "localhost")
        monkeypatch.setenv("MASTER_PORT", str(agent.port))
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(attempt))
        monkeypatch.setenv("GROUP_WORLD_SIZE", "1")
        monkeypatch.setenv("RANK", str(rank))
        train._meet_anew()
        assert os.environ["TORCHELASTIC_USE_AGENT_STORE"] == str(attempt == 0)
        ports.append(int(os.environ["MASTER_PORT"]))
    assert ports[0] == agent.port
    assert ports[1] == ports[2] and ports[3] == ports[4]
    assert len({ports[0], ports[1], ports[3]}) == 3
    monkeypatch.setenv("MASTER_PORT", str(agent.port))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"):
        train._meet_anew()


def lose_a_rank_under_fsdp() -> str:
    """Train under FSDP2 until the other rank is missed; return the error as train.py words it."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    fully_shard(model)

    def steps() -> None:
        for step in range(4):
            trainer.step = step
            if step == 2 and dist.get_rank() == 1:
                os._exit(1)
            model(torch.ones(2, 8)).sum().backward()

    trainer = SimpleNamespace(step=0, train=steps)
    try:
        train._train_to_the_end(trainer)  # type: ignore[arg-type]
    except RuntimeError as e:
        return str(e)
    return "nothing"


def test_a_lost_rank_is_named_by_fsdps_own_collectives_too() -> None:
    """FSDP2 raises what the network says; the step and the collective are put before it."""
    world = World(2, lose_a_rank_under_fsdp)
    try:
        assert world.pipes[0].poll(40)
        kind, text = world.pipes[0].recv()
    finally:
        world.end()
    assert kind == "result"
    named = r"step [23]: waiting for the other ranks in (un)?\w+, \w+: .*(closed|reset) by peer"
    assert re.match(named, text), text


def test_other_errors_stay_as_they_are() -> None:
    """Only the loss of a rank is put into other words."""

    def fail() -> None:
        raise RuntimeError("shape mismatch")

    with pytest.raises(RuntimeError, match=r"^shape mismatch$"):
        train._train_to_the_end(SimpleNamespace(step=1, train=fail))  # type: ignore[arg-type]
    assert awaited(RuntimeError("x")) == "a collective"
