"""Kill ranks of a training job again and again, and see that nothing is lost.

Runs a job through the launcher with restarts. Again and again one rank gets SIGKILL (or SIGSTOP: it
hangs) at a random moment of a step, a save or a load; the launcher starts the job again from its
newest complete checkpoint. After each kill every checkpoint in the folder is read whole. In the end
the losses of all steps and every byte of the last checkpoint must be those of an undisturbed run.

    python scripts/kill_loop.py --kills 30 --folder outputs/kill_loop --json record.json

With --forked the job is the small one of tests/checkpoint, in forked ranks: a second a kill.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.checkpoint.kills import contents  # noqa: E402
from tests.worlds import ranks_of  # noqa: E402
from torchtitan_dmuon.checkpoint.folder import CheckpointFolder  # noqa: E402

JOB = ["--config", "debug_owner_hsdp_z3.toml", "--training.seq_len", "32"]
JOB += ["--training.local_batch_size", "1", "--metrics.log_freq", "1", "--max_restarts", "6"]
JOB += ["--parallelism.owner_cost", "model", "--checkpoint.enable", "--checkpoint.interval", "2"]
JOB += ["--checkpoint.keep_latest_k", "2", "--comm.train_timeout_seconds", "20"]
MODES = ("disabled", "async")
PHASES = ("step",) * 4 + ("save",) * 5 + ("commit",) * 3 + ("delete",) * 2
PHASES += ("load",) * 2 + ("start",) * 2 + ("hang in step", "hang in save")
STEPS_PER_KILL = 5
PATIENCE = 300.0
"""Seconds that a job may take to get anywhere."""


@dataclass
class Kill:
    """One kill and what came of it."""

    number: int
    mode: str
    aim: str
    rank: int
    moment: str = ""
    seconds: float = 0.0
    """Until all ranks had ended."""
    newest: int | None = None
    resumed: int | None = None
    checkpoints: list[int] = field(default_factory=list)
    said: list[str] = field(default_factory=list)


class Launcher:
    """A running launcher, whose output is read by threads."""

    def __init__(self, folder: Path, steps: int, mode: str, ranks: int) -> None:
        command = [sys.executable, "-P", "-m", "torchtitan_dmuon.launch", *JOB]
        command += ["--dump_folder", str(folder), "--training.steps", str(steps)]
        command += ["--checkpoint.async_mode", mode]
        command += ["--parallelism.data_parallel_shard_degree", str(ranks // 2)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.lines: list[str] = []
        self.errors: list[str] = []
        for stream, lines in (
            (self.process.stdout, self.lines),
            (self.process.stderr, self.errors),
        ):
            threading.Thread(target=self._read, args=(stream, lines), daemon=True).start()

    @staticmethod
    def _read(stream, lines) -> None:  # type: ignore[no-untyped-def]
        for line in stream:
            lines.append(line.rstrip("\n"))

    def ranks(self) -> dict[int, int]:
        """Process ids of the ranks, by rank."""
        return ranks_of(self.process.pid)

    def wait_for(  # type: ignore[no-untyped-def]
        self, found, what: str, *, every: float = 0.05
    ) -> bool:
        """Wait until `found()`; False if the job ends first."""
        deadline = time.monotonic() + PATIENCE
        while not found():
            if self.process.poll() is not None:
                return bool(found())
            if time.monotonic() > deadline:
                raise SystemExit(f"no {what} in {PATIENCE:.0f} s\n" + "\n".join(self.lines[-20:]))
            time.sleep(every)
        return True


class Loop:
    """The kills, in sessions of as many as one launcher restarts.

    Args:
        folder: For both runs.
        kills: How many.
        seed: Fixes ranks and moments (within what the machine's own timing allows).
    """

    def __init__(self, folder: Path, kills: int, seed: int, ranks: int) -> None:
        self.folder, self.kills, self.size = folder, kills, ranks
        self.steps = STEPS_PER_KILL * kills
        self.random = random.Random(seed)
        self.done: list[Kill] = []
        self.losses: dict[int, str] = {}
        self.checkpoints = CheckpointFolder(folder / "killed" / "checkpoint")

    def undisturbed(self) -> dict[int, str]:
        """Train without kills; return the printed losses by step."""
        launcher = Launcher(self.folder / "undisturbed", self.steps, "disabled", self.size)
        launcher.process.wait()
        time.sleep(0.5)
        assert launcher.process.returncode == 0, "\n".join(launcher.errors)
        return losses(launcher.lines)

    def run(self) -> None:
        """Kill, session by session, and then let the job end."""
        session = 0
        while True:
            mode = MODES[session % len(MODES)]
            session += 1
            launcher = Launcher(self.folder / "killed", self.steps, mode, self.size)
            try:
                self._session(launcher, mode)
            finally:
                if launcher.process.poll() is None:
                    os.killpg(launcher.process.pid, signal.SIGKILL)
            if launcher.process.returncode == 0:
                return

    def compare(self) -> dict[str, Any]:
        """Train the same job undisturbed. Returns the record."""
        expected = self.undisturbed()
        name = f"step-{self.steps}"
        ours = contents(self.checkpoints.at(self.steps))
        theirs = contents(self.folder / "undisturbed" / "checkpoint" / name)
        return {
            "kills": [asdict(kill) for kill in self.done],
            "steps": self.steps,
            "final_loss": self.losses.get(self.steps),
            "undisturbed_final_loss": expected[self.steps],
            "steps_whose_loss_differs": [s for s in expected if self.losses.get(s) != expected[s]],
            "items_that_differ": differing(ours, theirs),
        }

    def _session(self, launcher: Launcher, mode: str) -> None:
        start = 0
        while len(self.done) < self.kills:
            kill = Kill(len(self.done) + 1, mode, self.random.choice(PHASES), 0)
            kill.rank = self.random.randrange(self.size)
            if not self._reach(launcher, kill, start):
                raise SystemExit(
                    f"the job ended early: {launcher.process.poll()}\n" + "\n".join(launcher.errors)
                )
            before = len(launcher.errors)
            self._kill(launcher, kill, start)
            start = len(launcher.lines)
            self.done.append(kill)
            report(kill)
            launcher.wait_for(lambda n=before: _has_ended(launcher.errors[n:]), "last words")
            time.sleep(0.3)
            kill.said = [e for e in launcher.errors[before:] if "failed" in e or "restart" in e]
            if not any(line.startswith("restart ") for line in launcher.errors[before:]):
                launcher.process.wait()
                assert launcher.process.returncode == 1
                return
        launcher.process.wait()
        time.sleep(0.5)
        assert launcher.process.returncode == 0, "\n".join(launcher.errors)
        self._note(launcher.lines)

    def _note(self, lines: list[str]) -> None:
        self.losses.update(losses(lines))

    def _reach(self, launcher: Launcher, kill: Kill, start: int) -> bool:
        """Wait for the moment of a kill, in an attempt whose output begins at line `start`."""
        path, draw = self.checkpoints.path, self.random

        def seen(pattern: str) -> bool:
            return any(re.search(pattern, line) for line in launcher.lines[start:])

        if not launcher.wait_for(lambda: len(launcher.ranks()) == self.size, "ranks"):
            return False
        if kill.aim == "start":
            time.sleep(draw.uniform(0.0, 12.0))
            return True
        if kill.aim == "load":
            first = r"Loading the checkpoint|no checkpoint in"
            found = launcher.wait_for(lambda: seen(first), "load")
            time.sleep(draw.uniform(0.0, 0.3))
            return found
        count = draw.randint(1, 4)
        if not launcher.wait_for(
            lambda: sum("step:" in line for line in launcher.lines[start:]) >= count, "step"
        ):
            return False
        if "save" in kill.aim:
            found = launcher.wait_for(lambda: any(path.glob("saving.*")), "save", every=0.002)
            time.sleep(draw.uniform(0.0, 0.2))
        elif kill.aim == "commit":
            found = launcher.wait_for(
                lambda: any(path.glob("saving.*/.metadata*")), "commit", every=0.001
            )
            time.sleep(draw.choice((0.0, 0.0, 0.002, 0.01)))
            kill.rank = 0
        elif kill.aim == "delete":
            found = launcher.wait_for(lambda: any(path.glob("deleting.*")), "delete", every=0.001)
            kill.rank = 0
        else:
            found = True
            time.sleep(draw.uniform(0.0, 0.5))
        return found

    def _kill(self, launcher: Launcher, kill: Kill, start: int) -> None:
        pids = launcher.ranks()
        hang = kill.aim.startswith("hang")
        os.kill(pids[kill.rank], signal.SIGSTOP if hang else signal.SIGKILL)
        moment = time.monotonic()
        there = {p.name for p in self.checkpoints.path.glob("*") if "." in p.name[1:]}
        last = max(losses(launcher.lines[start:]), default=None)
        kill.moment = f"after step {last}" if last is not None else "before the first step"
        if there:
            kill.moment += f", {', '.join(sorted(there))}"
        while any(Path(f"/proc/{pid}").exists() for pid in pids.values()):
            if time.monotonic() > moment + PATIENCE:
                raise SystemExit(f"kill {kill.number}: ranks do not end")
            time.sleep(0.02)
        kill.seconds = round(time.monotonic() - moment, 1)
        lines = launcher.lines[start:]
        self._note(lines)
        came_from = [re.search(r"loaded .*step-(\d+)", x) for x in lines]
        kill.resumed = next((int(m[1]) for m in came_from if m), None)
        before = self.done[-1] if self.done else None
        if before and kill.resumed is not None and kill.resumed != before.newest:
            raise SystemExit(
                f"kill {kill.number}: resumed from {kill.resumed}, not {before.newest}"
            )
        self._check(launcher, kill, lines, before)

    def _check(self, launcher: Launcher, kill: Kill, lines: list[str], before: Kill | None) -> None:
        """Read all checkpoints; what was said to be saved must be there."""
        kill.checkpoints = self.checkpoints.complete()
        for step in kill.checkpoints:
            contents(self.checkpoints.at(step))
        assert not self.checkpoints.torn()
        kill.newest = max(kill.checkpoints, default=None)
        saved = [re.search(r"saved .*step-(\d+):", line) for line in lines]
        promised = max([int(m[1]) for m in saved if m] + [before.newest or 0 if before else 0])
        if promised and (kill.newest or 0) < promised:
            raise SystemExit(f"kill {kill.number}: step-{promised} was saved and is lost")


def _has_ended(errors: list[str]) -> bool:
    """Whether the launcher has said all that it says of a failure."""
    return any(line.startswith(("restart ", "logs of every")) for line in errors)


def forked(folder: Path, kills: int, seed: int) -> dict[str, Any]:
    """Kill the small job of the tests. Returns the record."""
    from tests.checkpoint import kills as small
    from tests.worlds import run_world

    draw = random.Random(seed)
    steps = 6 * kills
    plan = small.Plan(str(folder / "undisturbed"), steps=steps)
    run_world(2, small.train, plan, timeout_seconds=600)
    expected = small.contents(folder / "undisturbed" / f"step-{steps}")
    done: list[dict[str, Any]] = []
    newest = 0
    for number in range(1, kills + 1):
        kill = small.Kill(draw.choice(small.AIMS), draw.randrange(2), hang=draw.random() < 0.1)
        plan = replace(plan, folder=str(folder / "killed"), mode=draw.choice(MODES))
        small.kill_once(plan, kill, newest, draw)
        (words,) = kill.words.values()
        print(
            f"| {number} | {plan.mode} | {'hang in ' * kill.hang}{kill.aim} | {kill.rank} | "
            f"{kill.moment or '-'} | {kill.seconds:.1f} s | step {newest} | step {kill.newest} | "
            f"{words.split(': [')[0]} |",
            flush=True,
        )
        newest = kill.newest or 0
        done.append({"mode": plan.mode, **asdict(kill)})
    run_world(2, small.train, plan, timeout_seconds=600)
    ours = small.contents(folder / "killed" / f"step-{steps}")
    return {"kills": done, "steps": steps, "items_that_differ": differing(ours, expected)}


def differing(ours: dict[str, bytes], theirs: dict[str, bytes]) -> list[str]:
    """Names of stored items that differ; a job seeds torch's generator only."""
    names = [
        k
        for k in ours.keys() | theirs.keys()
        if not re.fullmatch(r"rng\..*\.(python|numpy) None", k)
    ]
    return sorted(name for name in names if ours.get(name) != theirs.get(name))


def losses(lines: list[str]) -> dict[int, str]:
    """Printed losses by step."""
    found = (re.search(r"step:\s+(\d+)\s+loss:\s+([\d.]+)", line) for line in lines)
    return {int(m[1]): m[2] for m in found if m}


HEADER = "| kill | saving | aim | rank | moment | all ended after | attempt began at | newest |"


def row(kill: Kill) -> str:
    """One line of the table."""
    began = "the beginning" if kill.resumed is None else f"step {kill.resumed}"
    if kill.moment.startswith("before") and kill.resumed is None:
        began = "-"
    newest = "none" if kill.newest is None else f"step {kill.newest}"
    return (
        f"| {kill.number} | {kill.mode} | {kill.aim} | {kill.rank} | {kill.moment} | "
        f"{kill.seconds} s | {began} | {newest} |"
    )


def report(kill: Kill) -> None:
    """Print one line of the table."""
    print(row(kill), flush=True)


def main() -> int:
    """Exit status: 0 nothing was lost, 1 something was."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=30, help="how many (30)")
    parser.add_argument("--seed", type=int, default=0, help="of ranks and moments (0)")
    parser.add_argument("--forked", action="store_true", help="the small job, in forked ranks")
    parser.add_argument("--ranks", type=int, choices=(2, 4), default=4, help="of the job (4)")
    parser.add_argument("--folder", type=Path, required=True, help="for both runs; must be new")
    parser.add_argument("--json", type=Path, help="write the record to this file")
    options = parser.parse_args()
    if options.folder.exists():
        parser.error(f"--folder {options.folder}: exists already; expected a new folder")
    start = time.monotonic()
    print(HEADER + (" the other rank's word |" if options.forked else ""))
    print("| --- " * (9 if options.forked else 8) + "|", flush=True)
    if options.forked:
        record = forked(options.folder, options.kills, options.seed)
    else:
        loop = Loop(options.folder, options.kills, options.seed, options.ranks)
        loop.run()
        record = loop.compare()
    record["minutes"] = round((time.monotonic() - start) / 60, 1)
    kills = record["kills"]
    print("\n".join(f"{k}: {v}" for k, v in record.items() if v is not kills))
    if options.json:
        options.json.write_text(json.dumps(record, indent=1))
    lost = record["items_that_differ"] or record.get("steps_whose_loss_differs")
    print(f"{len(kills)} kills: {'SOMETHING WAS LOST' if lost else 'nothing lost'}")
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
