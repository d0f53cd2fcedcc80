"""Start one process per rank on this node: what run_train.sh runs.

Everything a user can get wrong is checked here, in one process, before any rank starts. The work
is torch.distributed's elastic agent's; this module chooses its settings and says in plain words
how a job ended.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

# Before the slow imports: Ctrl-C during them ends the launcher without a traceback.
if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from torchtitan_dmuon.config.errors import ConfigError
from torchtitan_dmuon.log import init_console
from torchtitan_dmuon.patching import PatchError, require_patched_torchtitan

if TYPE_CHECKING:
    from torchtitan_dmuon.config.manager import Job

SHUTDOWN_SECONDS = 5
"""How long ranks may take to end after Ctrl-C or the failure of another, before they are killed."""

_LOST_PEER = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "closed by remote",
)


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
    if "NGPU" in os.environ:
        ranks = _whole_number("NGPU", 0)
        if ranks < 1:
            raise ConfigError("NGPU: expected at least 1 rank per node (environment)")
        return ranks
    from torchtitan_dmuon.config.checks import degrees

    fixed = degrees(job)
    if fixed is None:  # data_parallel_shard_degree = -1 takes whatever there is
        return max(gpus, 1)
    if fixed % nodes:
        raise ConfigError(
            f"{job.at('parallelism')}: the degrees multiply to {fixed} ranks, which NNODES={nodes} "
            "nodes do not divide; set NGPU or change a degree"
        )
    return fixed // nodes


def _launch_config(cluster: Cluster, logs: Path) -> LaunchConfig:
    ranks = range(cluster.ranks_per_node)
    static = {"rank": cluster.node} if cluster.nodes > 1 else {}
    return LaunchConfig(
        min_nodes=cluster.nodes,
        max_nodes=cluster.nodes,
        nproc_per_node=cluster.ranks_per_node,
        run_id="torchtitan_dmuon",
        rdzv_backend="static" if static else "c10d",
        rdzv_endpoint=cluster.endpoint if static else "localhost:0",
        rdzv_configs={**static, "timeout": 900},
        # Rank 0 of a node writes progress straight to this terminal. All other output, other
        # libraries' stderr chatter included, goes to files that a failure's message names.
        logs_specs=DefaultLogsSpecs(
            log_dir=str(logs), redirects={r: Std.ERR if r == 0 else Std.ALL for r in ranks}
        ),
        max_restarts=0,
        shutdown_timeout=SHUTDOWN_SECONDS,
    )


def root_cause(failures: dict[int, ProcessFailure]) -> tuple[int, ProcessFailure]:
    """Choose, among ranks that failed together, the one that the others failed because of.

    A killed rank comes first, then an error of its own, then the loss of a peer, and last a rank
    that the agent itself ended; among equals the time decides.
    """

    def order(item: tuple[int, ProcessFailure]) -> tuple[int, int, int]:
        rank, failure = item
        text = _traceback(failure)
        if failure.exitcode == -signal.SIGTERM:
            kind = 3
        elif failure.exitcode < 0:
            kind = 0
        else:
            kind = 2 if any(phrase in text for phrase in _LOST_PEER) else 1
        return kind, failure.timestamp, rank

    return min(failures.items(), key=order)


def _hung(failures: dict[int, ProcessFailure], rank: int) -> bool:
    """Whether this rank was killed by the agent because it had made another one time out."""
    waited = any("Timed out waiting" in _traceback(f) for f in failures.values())
    return waited and failures[rank].exitcode == -signal.SIGKILL


def _traceback(failure: ProcessFailure) -> str:
    message = failure.message
    if isinstance(message, dict):
        extra = message.get("extraInfo", {})
        return str(extra.get("py_callstack") or message.get("message", ""))
    return str(message)


def _last_line(failure: ProcessFailure) -> str:
    return (_traceback(failure).strip().splitlines() or ["(no message)"])[-1].strip()


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
    if several_nodes and any(phrase in _traceback(first) for phrase in _LOST_PEER):
        lines = [
            f"error: rank {rank} lost a rank of another node; that node's launcher names the cause"
        ]
    lines += ["  " + line for line in _traceback(first).rstrip().splitlines()]
    for other, failure in sorted(failures.items()):
        if other != rank and failure.exitcode != -signal.SIGTERM:
            lines.append(f"  rank {other} then failed: {_last_line(failure)}")
    lines.append(f"logs of every rank: {logs}")
    return "\n".join(lines)


def run(arguments: list[str]) -> int:
    """Run a job on this node. Returns the exit status: 0, 1 failed, 2 user error, 128 + signal."""
    require_patched_torchtitan()
    # Imported late: these import torchtitan, whose version and patches come first.
    from torchtitan_dmuon.config.build import build, prepare_data
    from torchtitan_dmuon.config.checks import check, model_parallel
    from torchtitan_dmuon.config.manager import load_job, print_config

    job = load_job(arguments)
    if job.print_config:
        print_config(job.config)
        return 0
    cluster = find_cluster(job)
    check(job, cluster.world_size, cluster.device)
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
    try:
        elastic_launch(_launch_config(cluster, logs), sys.executable)(
            "-u", "-P", "-m", "torchtitan_dmuon.train", *arguments
        )
    except ChildFailedError as e:
        first = root_cause(e.failures)[1]
        if first.exitcode == 2:  # a user error that only the ranks could see
            print(f"error: {_last_line(first)}", file=sys.stderr)
            return 2
        text = explain(e.failures, logs.resolve(), several_nodes=cluster.nodes > 1)
        print(text, file=sys.stderr)
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
        # The reader of a pipe (head, less) has had enough; nothing is wrong.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


if __name__ == "__main__":
    sys.exit(main())
