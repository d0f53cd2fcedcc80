"""run_train.sh's launcher as a user meets it: output, exit status, lost ranks, Ctrl-C."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from tests.worlds import ranks_of
from torchtitan_dmuon.config.errors import ConfigError
from torchtitan_dmuon.config.manager import load_job
from torchtitan_dmuon.launch import explain, find_cluster, root_cause

ROOT = Path(__file__).resolve().parent.parent
_LAUNCH = [sys.executable, "-P", "-m", "torchtitan_dmuon.launch"]
SHORT = ["--training.seq_len", "32", "--metrics.log_freq", "1", "--lr_scheduler.warmup_steps", "0"]


def _start(
    *arguments: str, cwd: Path, program: Sequence[str] = _LAUNCH, **environment: str
) -> subprocess.Popen[str]:
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "NGPU", "WORLD_SIZE")}
    return subprocess.Popen(
        [*program, *arguments],
        cwd=cwd,
        env={**env, "PYTHONPATH": str(ROOT), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def _ranks_of(launcher: subprocess.Popen[str]) -> dict[int, int]:
    return ranks_of(launcher.pid)


def _wait_for_step(launcher: subprocess.Popen[str], step: int) -> list[str]:
    """Read the launcher's lines until a progress line of this step."""
    assert launcher.stdout is not None
    lines = []
    for line in launcher.stdout:
        lines.append(line)
        if re.search(rf"step:\s+{step}\b", line):
            return lines
    raise AssertionError("ended early:\n" + "".join(lines) + (launcher.stderr or sys.stdin).read())


@pytest.fixture
def endless(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A job on 2 ranks that would go on for hours, at its second step."""
    job = ["--dump_folder", str(tmp_path), "--training.steps", "100000", *SHORT]
    launcher = _start(*job, "--parallelism.data_parallel_shard_degree", "1", cwd=tmp_path)
    try:
        _wait_for_step(launcher, 2)
        yield launcher
    finally:
        if launcher.poll() is None:
            os.killpg(launcher.pid, signal.SIGKILL)
        for pid in _ranks_of(launcher).values():
            os.kill(pid, signal.SIGKILL)


def test_a_job_from_another_folder(tmp_path: Path) -> None:
    """A run prints plain progress lines of rank 0 only, and leaves logs and TensorBoard curves
    under the dump folder, wherever it is started."""
    job = tmp_path / "mine.toml"
    job.write_text(f'base = "{ROOT}/train_configs/debug_ddp.toml"\ndump_folder = "out"\n')
    two = ["--parallelism.data_parallel_replicate_degree", "2", "--metrics.log_freq", "3"]
    launcher = _start("--config", "mine.toml", "--training.steps", "4", *SHORT, *two, cwd=tmp_path)
    out, err = launcher.communicate(timeout=120)
    assert launcher.returncode == 0, err
    assert err == ""
    lines = [x for x in out.splitlines() if "step:" in x and "tps" in x]
    pattern = r"step:\s+\d+  loss:\s+[\d.]+  grad_norm:\s+[\d.]+  lr: \S+  tps: [\d,]+  memory: \S+"
    # The first step, every third, and the last.
    assert [int(re.findall(r"step:\s+(\d+)", x)[0]) for x in lines] == [1, 3, 4]
    assert all(re.search(pattern, line) for line in lines)
    assert "\033" not in out
    assert lines[-1].endswith("left: 0s")
    assert (tmp_path / "out" / "logs" / "rank_1.log").stat().st_size > 0
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    curves = EventAccumulator(str(next((tmp_path / "out" / "tb").iterdir())))
    curves.Reload()
    wanted = {"loss_metrics/global_avg_loss", "grad_norm", "throughput(tps)", "lr/AdamW"}
    assert wanted <= set(curves.Tags()["scalars"])


@pytest.mark.gpu
@pytest.mark.slow
def test_the_debug_job_trains_on_a_gpu(tmp_path: Path) -> None:
    """One GPU with flex attention starts from the loss that one CPU rank starts from."""
    losses = {}
    for device in ("cuda", "cpu"):
        job = ["--config", "debug.toml", "--device", device, "--training.steps", "3", *SHORT]
        launcher = _start(*job, "--dump_folder", device, cwd=tmp_path, NGPU="1")
        out, err = launcher.communicate(timeout=280)
        assert launcher.returncode == 0, err
        losses[device] = [float(x) for x in re.findall(r"loss:\s+([\d.]+)", out)]
    assert losses["cuda"] == pytest.approx(losses["cpu"], rel=1e-2)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--config", "nope.toml"], r"^error: --config nope.toml: no such file"),
        pytest.param(
            ["--optimizer.lr", "-1"],
            r"^error: --optimizer.lr: expected a number >= 0",
            marks=pytest.mark.long,
        ),
    ],
)
def test_user_errors_are_one_line_and_status_2(
    arguments: list[str], expected: str, tmp_path: Path
) -> None:
    """A mistake ends the launcher before any rank starts: status 2, one line, no traceback."""
    launcher = _start(*arguments, cwd=tmp_path)
    out, err = launcher.communicate(timeout=60)
    assert launcher.returncode == 2
    assert out == ""
    assert re.match(expected, err)
    assert len(err.splitlines()) == 1


def test_a_killed_rank_is_named_first(endless: subprocess.Popen[str]) -> None:
    """kill -9 of one rank ends the job within seconds; the first line of the error names it."""
    os.kill(_ranks_of(endless)[1], signal.SIGKILL)
    start = time.monotonic()
    _, err = endless.communicate(timeout=60)
    assert time.monotonic() - start < 30
    assert endless.returncode == 1
    assert err.splitlines()[0] == "error: rank 1 failed first (killed by SIGKILL)"
    assert "logs of every rank: " in err
    assert _ranks_of(endless) == {}


def test_ctrl_c_ends_every_rank(endless: subprocess.Popen[str]) -> None:
    """Ctrl-C in the terminal ends launcher and ranks within seconds, without a traceback."""
    pids = _ranks_of(endless)
    assert set(pids) == {0, 1}
    start = time.monotonic()
    os.kill(endless.pid, signal.SIGINT)
    _, err = endless.communicate(timeout=60)
    assert time.monotonic() - start < 10
    assert endless.returncode == 128 + signal.SIGINT
    assert err.strip() == "stopped by SIGINT: all ranks of this node have ended"
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids.values())


def test_ranks_end_with_their_launcher(endless: subprocess.Popen[str]) -> None:
    """kill -9 of the launcher leaves no rank behind that goes on training."""
    pids = _ranks_of(endless)
    assert len(pids) == 2
    os.kill(endless.pid, signal.SIGKILL)
    endless.wait()
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in pids.values()):
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.long
def test_a_failed_save_names_its_cause(tmp_path: Path) -> None:
    """A checkpoint that cannot be written ends the job with one line and status 2, and the file in
    its way stays; a file of the current folder with the name of a module is not taken for it."""
    (tmp_path / "tomli_w.py").write_text("raise SystemExit('shadowed')")
    steps = tmp_path / "out" / "checkpoint"
    steps.mkdir(parents=True)
    (steps / "step-2").write_text("in the way")
    save = ["--checkpoint.enable", "--checkpoint.interval", "2", "--training.steps", "3"]
    job = ["--config", "debug.toml", "--dump_folder", "out", *SHORT, *save]
    launcher = _start(*job, cwd=tmp_path, NGPU="1")
    _, err = launcher.communicate(timeout=120)
    assert launcher.returncode == 2, err
    assert re.fullmatch(
        r"error: out/checkpoint/step-2: a file is in the way; nothing was written\n", err
    )
    assert (steps / "step-2").read_text() == "in the way"


def _failure(message: str, exitcode: int = 1, timestamp: int = 5) -> ProcessFailure:
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=exitcode, error_file="none")
    failure.message, failure.timestamp = message, timestamp
    return failure


def test_root_cause_is_not_the_rank_that_lost_its_peer() -> None:
    """Ranks that failed because another did are never blamed, whatever the clock says."""
    lost = _failure("RuntimeError: [..] Connection closed by peer [127.0.0.1]:1", timestamp=1)
    own = _failure("ValueError: bad", timestamp=2)
    killed = _failure("Signal 9", exitcode=-9, timestamp=3)
    assert root_cause({0: lost, 1: own})[0] == 1
    assert root_cause({0: lost, 1: own, 3: killed})[0] == 3
    assert root_cause({0: lost, 2: _failure("x", timestamp=9)})[0] == 2


def test_another_nodes_failure_is_not_blamed_on_this_one(tmp_path: Path) -> None:
    """On several nodes a rank that lost a peer is not said to have failed first."""
    lost = {1: _failure("RuntimeError: Connection closed by peer [10.0.0.2]:1")}
    assert "rank 1 failed first" in explain(lost, tmp_path)
    text = explain(lost, tmp_path, several_nodes=True).splitlines()[0]
    assert text.startswith("error: rank 1 lost a rank of another node")


def test_a_hung_rank_is_not_called_killed(tmp_path: Path) -> None:
    """A rank that the agent had to kill because others timed out on it is said to have hung."""
    failures = {
        0: _failure("RuntimeError: Timed out waiting 10000ms for recv operation to complete"),
        1: _failure("Signal 9 (SIGKILL) received", exitcode=-9),
    }
    text = explain(failures, tmp_path).splitlines()
    assert text[0].startswith("error: rank 1 failed first (it did not answer")
    assert "rank 0 then failed: RuntimeError: Timed out" in text[2]


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"NGPU": "0"}, "NGPU: expected at least 1"),
        ({"NGPU": "two"}, 'NGPU: expected a whole number, got "two"'),
        ({"NNODES": "2"}, "NNODES > 1 needs MASTER_ADDR"),
        (
            {"NNODES": "2", "NODE_RANK": "2", "MASTER_ADDR": "localhost"},
            "expected 0 <= NODE_RANK < NNODES",
        ),
        ({"MASTER_PORT": "99999"}, "MASTER_PORT: expected a port from 1 to 65535"),
        ({"NNODES": "2", "MASTER_ADDR": "no.such.host.invalid"}, "MASTER_ADDR: no such host"),
        ({"NNODES": "3", "MASTER_ADDR": "localhost"}, "multiply to 4 ranks, which NNODES=3"),
    ],
)
def test_launcher_variables_are_checked(
    environment: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong launcher variable is named, with what was expected."""
    for name in ("NGPU", "NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=re.escape(expected)):
        find_cluster(load_job([]))


def test_ranks_come_from_the_degrees_or_ngpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without NGPU a node runs what the degrees ask for; on several nodes its share of it."""
    for name in ("NGPU", "NNODES", "NODE_RANK", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    assert find_cluster(load_job([])).ranks_per_node == 4
    monkeypatch.setenv("NNODES", "2")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    assert find_cluster(load_job([])).ranks_per_node == 2
    monkeypatch.setenv("NGPU", "3")
    assert find_cluster(load_job([])).world_size == 6
