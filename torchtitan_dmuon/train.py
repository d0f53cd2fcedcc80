"""One rank of a training job: `torchrun ... -m torchtitan_dmuon.train --config X.toml`.

run_train.sh starts these through launch.py. Without torchrun's variables one process trains alone.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import socket
import sys
import threading
import traceback
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from torch.distributed.elastic.multiprocessing.errors import record

from torchtitan_dmuon.config.errors import ConfigError
from torchtitan_dmuon.log import init_console, log_to_file, logger
from torchtitan_dmuon.lost_rank import awaited, is_lost
from torchtitan_dmuon.patching import PatchError, require_patched_torchtitan

if TYPE_CHECKING:
    from torchtitan_dmuon.trainer import Trainer

_PR_SET_PDEATHSIG = 1

_MEETING_SECONDS = 300
"""How long the ranks of a restarted job may be apart at their start."""


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return int(s.getsockname()[1])


def _alone() -> None:
    """Make a world of one rank where no launcher described another."""
    port = _free_port()
    for name, value in (
        ("RANK", "0"),
        ("LOCAL_RANK", "0"),
        ("WORLD_SIZE", "1"),
        ("MASTER_ADDR", "localhost"),
        ("MASTER_PORT", str(port)),
    ):
        os.environ.setdefault(name, value)


def resolve(arguments: list[str], rank: int) -> tuple[Trainer.Config, str] | None:
    """Return the checked config and, on rank 0, the job's plan in a line.

    None if the config or the plan was only to be printed.

    Raises:
        ConfigError: before any process group is made.
    """
    # Imported late: these import torchtitan, whose version and patches are checked first.
    from torchtitan.tools.utils import device_type

    from torchtitan_dmuon.config.build import build
    from torchtitan_dmuon.config.checks import check, with_degrees
    from torchtitan_dmuon.config.manager import load_job, print_config
    from torchtitan_dmuon.planner.command import line_for_log, plan_here
    from torchtitan_dmuon.planner.text import report

    job = load_job(arguments, quiet=rank != 0)
    if job.print_config:
        if rank == 0:
            print_config(job.config)
        return None
    world_size = int(os.environ["WORLD_SIZE"])
    job = with_degrees(job, world_size)
    check(job, world_size, device_type)
    local = int(os.environ.get("LOCAL_WORLD_SIZE", str(world_size)))
    if job.plan:
        if rank == 0:
            print(report(plan_here(job, world_size, local, device_type)))
        return None
    config = build(job, device_type)
    return config, line_for_log(job, world_size, local, device_type) if rank == 0 else ""


def train(config: Trainer.Config, rank: int, plan: str = "") -> None:
    """Train on this rank; `plan` is what the job is expected to cost, for its log."""
    import torch
    from torchtitan.observability import structured_logger

    log_to_file(Path(config.dump_folder, "logs"), rank)
    if plan:
        logger.info(plan)
    structured_logger.init_structured_logger(
        source="training",
        output_dir=config.dump_folder,
        enable=config.debug.enable_structured_logging,
    )
    trainer = None
    try:
        trainer = config.build()
        if config.checkpoint.create_seed_checkpoint:
            trainer.checkpointer.save(curr_step=0, last_step=True)
            logger.info("seed checkpoint saved in %s", trainer.checkpointer.folder)
        else:
            _train_to_the_end(trainer)
            logger.info("done: step %d of %d", trainer.step, config.training.steps)
    finally:
        if trainer is not None:
            trainer.close()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _train_to_the_end(trainer: Trainer) -> None:
    """Train; where another rank is lost, say in which step and what was waited for."""
    try:
        trainer.train()
    except RuntimeError as e:
        text = " ".join(str(e).split())
        # Those of owned matrices and of checkpoints say it themselves.
        named = text.startswith("dmuon ") or "waiting for the " in text
        if named or not is_lost(text):
            raise
        raise RuntimeError(
            f"step {trainer.step}: waiting for the other ranks in {awaited(e)}: {text}"
        ) from e


def _meet_anew() -> None:
    """Have the ranks of a job that torchrun has restarted meet at a store of their own.

    The store of torchrun's agent outlives the ranks: those of the next attempt would find in it the
    addresses of the dead.

    Raises:
        ConfigError: there are several nodes, which count restarts each for itself.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if not attempt or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return
    if os.environ.get("GROUP_WORLD_SIZE", "1") != "1":
        raise ConfigError(
            "torchrun restarts a job on several nodes only with --rdzv-backend c10d and "
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in the environment of each; run_train.sh with "
            "max_restarts sets both"
        )
    agent = TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        timeout=timedelta(seconds=_MEETING_SECONDS),
    )
    key = f"torchtitan_dmuon/port_of_attempt_{attempt}"
    if os.environ["RANK"] == "0":
        agent.set(key, str(_free_port()))
    os.environ["MASTER_PORT"] = agent.get(key).decode()
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"


@record
def run(arguments: list[str], rank: int) -> None:
    """Train a job. An error is recorded for the launcher, which decides what to show."""
    require_patched_torchtitan()
    resolved = resolve(arguments, rank)
    if resolved is not None:
        _meet_anew()
        train(resolved[0], rank, resolved[1])


def _end_with_parent() -> None:
    """Ask Linux to kill this rank when the process that started it dies, however it dies."""
    parent = os.getppid()
    if sys.platform != "linux":
        return
    # Also seen by a parent that died before this call: the rank was then given another one.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def main() -> int:
    """Entry point. Exit status: 0, 1 failed, 2 user error."""
    if "RANK" not in os.environ:
        _alone()
    else:
        # A rank that waits for another in a collective does not run Python's handler.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        _end_with_parent()
    rank = int(os.environ["RANK"])
    init_console(rank)
    try:
        run(sys.argv[1:], rank)
    except (ConfigError, PatchError) as e:
        if rank == 0:
            print(f"error: {e}", file=sys.stderr)
        return 2
    return 0


def _end(status: int) -> NoReturn:
    """End a rank without the last part of the interpreter's own end.

    If it failed, that may wait for ranks that died. If not, all that is left are destructors of
    libraries' globals, of which torch's has been seen to abort a finished job on a busy machine.
    """
    if not status:
        for thread in threading.enumerate():
            if thread is not threading.main_thread() and not thread.daemon:
                thread.join()
        atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    try:
        _status = main()
    except Exception:
        traceback.print_exc()
        _status = 1
    _end(_status)
