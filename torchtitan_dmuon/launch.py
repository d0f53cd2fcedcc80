"""Start one process per rank on this node: what run_train.sh runs.

Everything a user can get wrong is checked here, in one process, before any rank starts. The work
is torch.distributed's elastic agent's; this module chooses its settings and says in plain words
how a job ended. With `max_restarts` a job that lost a rank goes on from its last checkpoint.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

# Before the slow imports: Ctrl-C during them ends the launcher without a traceback.
if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import torch
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler
from torch.distributed.launcher.api import LaunchConfig

from torchtitan_dmuon.config.errors import ConfigError
from torchtitan_dmuon.log import end_of_pipe, init_console
from torchtitan_dmuon.lost_rank import LOST_PEER, TIMED_OUT
from torchtitan_dmuon.patching import PatchError, require_patched_torchtitan

if TYPE_CHECKING:
    from torchtitan_dmuon.config.manager import Job

SHUTDOWN_SECONDS = 5
"""How long ranks may take to end after Ctrl-C or the failure of another, before they are killed."""

LAST_WORDS_SECONDS = 3
"""How long the others may take, once a rank has failed, to fail by themselves and say of what."""

USER_ERROR = 2
"""Exit status of a rank that found a mistake of the user: another try would find it again."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """The part of the world that the environment describes.

    Read from the launcher variables that torchtitan's and torchrun's scripts use: NGPU (ranks on
    this node), NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT.
    """

    nodes: int
    node: int
    ranks_per_node: int
    endpoint: str
    device: str

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node


def _whole_number(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    if not text:
        return default
    if not text.isdecimal():
        raise ConfigError(f'{name}: expected a whole number, got "{text}" (environment)')
    return int(text)


def find_cluster(job: Job) -> Cluster:
    """Decide how many ranks run here and on which device.

    Raises:
        ConfigError: the environment and the config do not fit together.
    """
    nodes, node = _whole_number("NNODES", 1), _whole_number("NODE_RANK", 0)
    if nodes < 1 or node >= nodes:
        raise ConfigError(f"NODE_RANK={node} with NNODES={nodes}: expected 0 <= NODE_RANK < NNODES")
    address = os.environ.get("MASTER_ADDR", "")
    if nodes > 1 and not address:
        raise ConfigError(
            "NNODES > 1 needs MASTER_ADDR: the host name of the node with NODE_RANK=0"
        )
    if nodes > 1:
        try:
            socket.getaddrinfo(address, None)
        except OSError as e:
            raise ConfigError(f"MASTER_ADDR: no such host: {address} (environment)") from e
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    ranks = _ranks_per_node(job, nodes, gpus)
    wanted = job.config.device
    if wanted == "cuda" and ranks > gpus:
        raise ConfigError(
            f"{job.at('device')}: {ranks} ranks on this node need as many GPUs, found {gpus}; set "
            f"NGPU, or try the job on CPUs with --device cpu"
        )
    device = "cuda" if wanted != "cpu" and 0 < ranks <= gpus else "cpu"
    port = _whole_number("MASTER_PORT", 29500)
    if not 0 < port < 2**16:
        raise ConfigError(f"MASTER_PORT: expected a port from 1 to 65535, got {port} (environment)")
    return Cluster(nodes, node, ranks, f"{address}:{port}", device)


def _ranks_per_node(job: Job, nodes: int, gpus: int) -> int:
    if job.smoke is not None:
        return _smoke_ranks(job, nodes)
    if "NGPU" in os.environ:
        ranks = _whole_number("NGPU", 0)
        if ranks < 1:
            raise ConfigError("NGPU: expected at least 1 rank per node (environment)")
        return ranks
    from torchtitan_dmuon.config.checks import degrees

    fixed = degrees(job)
    if fixed is None:  # an open degree (-1) takes whatever there is
        return max(gpus, 1)
    if fixed % nodes:
        raise ConfigError(
            f"{job.at('parallelism')}: the degrees multiply to {fixed} ranks, which NNODES={nodes} "
            "nodes do not divide; set NGPU or change a degree"
        )
    return fixed // nodes


def _smoke_ranks(job: Job, nodes: int) -> int:
    """Ranks of a smoke run, whatever NGPU says: it may be there for the job itself."""
    from torchtitan_dmuon.config.checks import degrees
    from torchtitan_dmuon.config.smoke import RANKS

    if nodes > 1:
        raise ConfigError(f"--smoke: runs on one node, but NNODES={nodes} (environment)")
    return degrees(job) or RANKS


def _launch_config(cluster: Cluster, logs: Path, max_restarts: int) -> LaunchConfig:
    ranks = range(cluster.ranks_per_node)
    several = cluster.nodes > 1
    # A static rendezvous keeps the numbers of the nodes, and meets once only.
    static = several and not max_restarts
    if static:
        details = {"rank": cluster.node}
    else:
        details = {"is_host": cluster.node == 0, "read_timeout": 900} if several else {}
    return LaunchConfig(
        min_nodes=cluster.nodes,
        max_nodes=cluster.nodes,
        nproc_per_node=cluster.ranks_per_node,
        run_id="torchtitan_dmuon",
        rdzv_backend="static" if static else "c10d",
        rdzv_endpoint=cluster.endpoint if several else "localhost:0",
        rdzv_configs={**details, "timeout": 900},
        # Rank 0 of a node writes progress straight to this terminal. All other output, other
        # libraries' stderr chatter included, goes to files that a failure's message names.
        logs_specs=DefaultLogsSpecs(
            log_dir=str(logs), redirects={r: Std.ERR if r == 0 else Std.ALL for r in ranks}
        ),
        max_restarts=max_restarts,
        shutdown_timeout=SHUTDOWN_SECONDS,
    )


class _Agent(LocalElasticAgent):
    """torch's agent, which lets ranks say what they waited for and tells of each restart.

    Args:
        config: How to launch.
        arguments: Of Python, in each rank.
        restarting: Is told, before a restart, the failures by rank and the number of the restart.
    """

    def __init__(
        self,
        config: LaunchConfig,
        arguments: tuple[str, ...],
        restarting: Callable[[dict[int, ProcessFailure], int], None],
    ) -> None:
        rendezvous = RendezvousParameters(
            backend=config.rdzv_backend,
            endpoint=config.rdzv_endpoint,
            run_id=config.run_id,
            min_nodes=config.min_nodes,
            max_nodes=config.max_nodes,
            **config.rdzv_configs,
        )
        address, _, port = config.rdzv_endpoint.rpartition(":")
        is_static = config.rdzv_backend == "static"
        spec = WorkerSpec(
            role="trainer",
            local_world_size=config.nproc_per_node,
            rdzv_handler=get_rendezvous_handler(rendezvous),
            entrypoint=sys.executable,
            args=arguments,
            max_restarts=config.max_restarts,
            monitor_interval=config.monitor_interval,
            master_addr=address if is_static else None,
            master_port=int(port) if is_static else None,
            numa_options=config.numa_options,
        )
        assert config.logs_specs is not None and config.shutdown_timeout is not None
        super().__init__(spec, config.logs_specs, shutdown_timeout=config.shutdown_timeout)
        self._restarting = restarting

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._hear_last_words()
        result: RunResult = super()._monitor_workers(worker_group)
        if result.state == WorkerState.FAILED and self._remaining_restarts:
            if root_cause(result.failures)[1].exitcode == USER_ERROR:
                self._remaining_restarts = 0
            else:
                number = worker_group.spec.max_restarts - self._remaining_restarts + 1
                self._restarting(result.failures, number)
        return result

    def _hear_last_words(self) -> None:
        """Once a rank has failed, wait for the others to say why they fail too, and end them."""
        handlers: dict[int, SubprocessHandler] = getattr(self._pcontext, "subprocess_handlers", {})
        ranks = [handler.proc for handler in handlers.values()]
        if not any(rank.poll() for rank in ranks):
            return
        _wait(ranks, LAST_WORDS_SECONDS)
        # torch's agent would give a rank that hangs half a minute between the two signals.
        for rank in ranks:
            rank.terminate()
        _wait(ranks, SHUTDOWN_SECONDS)
        for rank in ranks:
            rank.kill()


def _wait(ranks: list[subprocess.Popen[bytes]], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while any(rank.poll() is None for rank in ranks) and time.monotonic() < deadline:
        time.sleep(0.05)


def _launch(
    config: LaunchConfig,
    arguments: tuple[str, ...],
    restarting: Callable[[dict[int, ProcessFailure], int], None],
) -> None:
    """Run the ranks of this node to their end.

    Raises:
        ChildFailedError: a rank failed, and no restart was left.
        RendezvousError: the nodes did not meet.
        SignalException: this process was told to stop.
    """
    agent = _Agent(config, arguments, restarting)
    rendezvous = agent.get_worker_group().spec.rdzv_handler
    try:
        result = agent.run()
    except SignalException:
        raise  # the other nodes may go on without this one
    except BaseException:
        rendezvous.shutdown()
        raise
    rendezvous.shutdown()
    if result.is_failed():
        raise ChildFailedError(name="train", failures=result.failures)


def root_cause(failures: dict[int, ProcessFailure]) -> tuple[int, ProcessFailure]:
    """Choose, among ranks that failed together, the one that the others failed because of.

    A killed rank comes first, then an error of its own, then the loss of a peer, and last a rank
    that the agent itself ended; among equals the time decides.
    """

    def order(item: tuple[int, ProcessFailure]) -> tuple[int, int, int]:
        rank, failure = item
        text = _traceback(failure)
        if _was_ended(failure):
            kind = 3
        elif failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM:
            kind = 0
        else:
            kind = 2 if any(phrase in text for phrase in LOST_PEER) else 1
        return kind, failure.timestamp, rank

    return min(failures.items(), key=order)


def _was_ended(failure: ProcessFailure) -> bool:
    """Whether a rank did not fail, but was told to end. One may fail and take long to end."""
    return failure.exitcode == -signal.SIGTERM and not isinstance(failure.message, dict)


def _hung(failures: dict[int, ProcessFailure], rank: int) -> bool:
    """Whether this rank was killed by the agent because it had made another one time out."""
    waited = any(TIMED_OUT in _traceback(f) for f in failures.values())
    return waited and failures[rank].exitcode == -signal.SIGKILL


def _traceback(failure: ProcessFailure) -> str:
    message = failure.message
    if isinstance(message, dict):
        extra = message.get("extraInfo", {})
        return str(extra.get("py_callstack") or message.get("message", ""))
    return str(message)


def _last_line(failure: ProcessFailure) -> str:
    return (_traceback(failure).strip().splitlines() or ["(no message)"])[-1].strip()


def _message(failure: ProcessFailure) -> str:
    """Return the last line of a traceback without the name of the class."""
    return re.sub(r"^[\w.]+: ", "", _last_line(failure), count=1)


def explain(failures: dict[int, ProcessFailure], logs: Path, *, several_nodes: bool = False) -> str:
    """Say how a job failed: the first rank's error first, then one line for each other rank.

    Args:
        failures: The ranks of this node that failed, by rank.
        logs: Folder of the logs.
        several_nodes: Whether there are ranks that this launcher does not see.
    """
    rank, first = root_cause(failures)
    how = f"exit status {first.exitcode}"
    if _hung(failures, rank):
        how = "it did not answer; others waited for it until they timed out"
    elif first.exitcode < 0:
        how = f"killed by {first.signal_name()}"
    lines = [f"error: rank {rank} failed first ({how})"]
    if several_nodes and any(phrase in _traceback(first) for phrase in LOST_PEER):
        lines = [
            f"error: rank {rank} lost a rank of another node; that node's launcher names the cause"
        ]
    lines += ["  " + line for line in _traceback(first).rstrip().splitlines()]
    for other, failure in sorted(failures.items()):
        if other != rank and not _was_ended(failure):
            lines.append(f"  rank {other} then failed: {_last_line(failure)}")
    lines.append(f"logs of every rank: {logs}")
    return "\n".join(lines)


def run(arguments: list[str]) -> int:
    """Run a job on this node. Returns the exit status: 0, 1 failed, 2 user error, 128 + signal."""
    require_patched_torchtitan()
    # Imported late: these import torchtitan, whose version and patches come first.
    from torchtitan_dmuon.config.build import build, prepare_data
    from torchtitan_dmuon.config.checks import check, model_parallel, with_degrees
    from torchtitan_dmuon.config.manager import load_job, print_config

    job = load_job(arguments)
    if job.print_config:
        print_config(job.config)
        return 0
    for line in job.smoke or ():
        print(line)
    if job.plan and job.config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "--plan: plans for this machine, which has no GPU; for a cluster: dmuon plan "
            f"{job.path} --nodes N"
        )
    cluster = find_cluster(job)
    job = with_degrees(job, cluster.world_size)
    fits = not job.plan or _plan(job, cluster)
    check(job, cluster.world_size, cluster.device)
    if job.plan:
        return 0 if fits else 1
    if cluster.node == 0:
        _check_checkpoint_folder(job)
    config = build(job, cluster.device)
    init_console(0)
    try:
        prepare_data(config, cluster.world_size // model_parallel(job))
    except OSError as e:
        raise ConfigError(f"{job.at('dataloader.cache_folder')}: {e.strerror or e}") from e
    logs = Path(job.config.dump_folder, "logs")
    try:
        logs.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise ConfigError(f"{job.at('dump_folder')}: cannot be made: {e.strerror}: {logs}") from e
    if cluster.device == "cpu":
        # Ranks must not see GPUs that they are not to use.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ.setdefault("OMP_NUM_THREADS", str(_threads(cluster)))
    print(
        f"{cluster.ranks_per_node} ranks on {cluster.device} "
        f"(node {cluster.node} of {cluster.nodes}), logs in {logs}",
        flush=True,
    )
    # The agent reports what happened through exceptions; its log lines only repeat it.
    logging.disable(logging.CRITICAL)
    return _train(job, cluster, logs, arguments)


def _plan(job: Job, cluster: Cluster) -> bool:
    """Print what the job would cost on this machine. Returns whether it fits."""
    from torchtitan_dmuon.planner.command import plan_here
    from torchtitan_dmuon.planner.text import report

    plan = plan_here(job, cluster.world_size, cluster.ranks_per_node, cluster.device)
    print(report(plan))
    return plan.fits


def _train(job: Job, cluster: Cluster, logs: Path, arguments: list[str]) -> int:
    """Run the ranks, started again where the job says so; say how it ended. Returns the status."""
    several = cluster.nodes > 1
    most = job.config.max_restarts

    def restarting(failures: dict[int, ProcessFailure], number: int) -> None:
        print(explain(failures, logs.resolve(), several_nodes=several), file=sys.stderr)
        print(f"restart {number} of {most}: {_start_of_restart(job)}", file=sys.stderr, flush=True)

    if most:
        # A store that outlives the ranks would hand on the addresses of those that are dead.
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    try:
        command = ("-u", "-P", "-m", "torchtitan_dmuon.train", *arguments)
        _launch(_launch_config(cluster, logs, most), command, restarting)
    except ChildFailedError as e:
        first = root_cause(e.failures)[1]
        if first.exitcode == USER_ERROR:  # one that only the ranks could see
            print(f"error: {_message(first)}", file=sys.stderr)
            return USER_ERROR
        print(explain(e.failures, logs.resolve(), several_nodes=several), file=sys.stderr)
        return 1
    except (RendezvousError, torch.distributed.DistError) as e:
        why = str(e).strip().splitlines()[0]
        print(
            f"error: {cluster.nodes} nodes did not meet at {cluster.endpoint}: {why}",
            file=sys.stderr,
        )
        return 1
    except SignalException as e:
        name = signal.Signals(e.sigval).name
        print(f"stopped by {name}: all ranks of this node have ended", file=sys.stderr)
        return 128 + int(e.sigval)
    return 0


def _check_checkpoint_folder(job: Job) -> None:
    """Raise ConfigError if checkpoints cannot be written, or another job writes there."""
    from torchtitan_dmuon.checkpoint.folder import CheckpointFolder

    checkpoint = job.config.checkpoint
    if checkpoint.enable and not checkpoint.load_only:
        lock = CheckpointFolder(Path(job.config.dump_folder, checkpoint.folder)).lock()
        if lock is not None:
            lock.close()  # the first rank takes it


def _start_of_restart(job: Job) -> str:
    """Say from where a job goes on that is started again."""
    from torchtitan_dmuon.checkpoint.folder import CheckpointFolder

    folder = CheckpointFolder(Path(job.config.dump_folder, job.config.checkpoint.folder))
    steps = folder.complete()
    if steps:
        return f"going on from {folder.at(steps[-1])}"
    return f"there is no complete checkpoint in {folder.path} yet; it starts from the beginning"


def _threads(cluster: Cluster) -> int:
    """CPU threads of one rank: its share of the cores, on GPUs one."""
    return (
        1 if cluster.device == "cuda" else max(1, (os.cpu_count() or 1) // cluster.ranks_per_node)
    )


def main() -> int:
    """Entry point of `python -m torchtitan_dmuon.launch`; arguments as for train."""
    try:
        return run(sys.argv[1:])
    except (ConfigError, PatchError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        return end_of_pipe()


if __name__ == "__main__":
    sys.exit(main())
