"""One rank of a training job: `torchrun ... -m torchtitan_dmuon.train --config X.toml`.

run_train.sh starts these through launch.py. Without torchrun's variables one process trains alone.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from torch.distributed.elastic.multiprocessing.errors import record

from torchtitan_dmuon.config.errors import ConfigError
from torchtitan_dmuon.log import init_console, log_to_file, logger
from torchtitan_dmuon.patching import PatchError, require_patched_torchtitan

if TYPE_CHECKING:
    from torchtitan_dmuon.trainer import Trainer

_PR_SET_PDEATHSIG = 1


def _alone() -> None:
    """Make a world of one rank where no launcher described another."""
    with socket.socket() as s:
        s.bind(("localhost", 0))
        port = s.getsockname()[1]
    for name, value in (
        ("RANK", "0"),
        ("LOCAL_RANK", "0"),
        ("WORLD_SIZE", "1"),
        ("MASTER_ADDR", "localhost"),
        ("MASTER_PORT", str(port)),
    ):
        os.environ.setdefault(name, value)


def resolve(arguments: list[str], rank: int) -> Trainer.Config | None:
    """Return the checked config, or None if it was only to be printed.

    Raises:
        ConfigError: before any process group is made.
    """
    # Imported late: these import torchtitan, whose version and patches are checked first.
    from torchtitan.tools.utils import device_type

    from torchtitan_dmuon.config.build import build
    from torchtitan_dmuon.config.checks import check
    from torchtitan_dmuon.config.manager import load_job, print_config

    job = load_job(arguments, quiet=rank != 0)
    if job.print_config:
        if rank == 0:
            print_config(job.config)
        return None
    check(job, int(os.environ["WORLD_SIZE"]), device_type)
    return build(job, device_type)


@record
def train(config: Trainer.Config, rank: int) -> None:
    """Train on this rank. An error is recorded for the launcher, which decides what to show."""
    import torch
    from torchtitan.observability import structured_logger

    log_to_file(Path(config.dump_folder, "logs"), rank)
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
            trainer.train()
            logger.info("done: step %d of %d", trainer.step, config.training.steps)
    finally:
        if trainer is not None:
            trainer.close()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


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
        require_patched_torchtitan()
        config = resolve(sys.argv[1:], rank)
        if config is not None:
            train(config, rank)
    except (ConfigError, PatchError) as e:
        if rank == 0:
            print(f"error: {e}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
