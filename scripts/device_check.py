#!/usr/bin/env python3
"""What only a GPU can show, in a few minutes: device_check.sh runs this; see --help and `KEYS`."""

from __future__ import annotations

import json
import math
import os
import platform
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# This checkout, also where another one is installed.
sys.path.insert(0, str(ROOT))

import tyro  # noqa: E402

from torchtitan_dmuon.bench.bounded import (  # noqa: E402
    Budget,
    Context,
    Note,
    Outcome,
    Part,
    Report,
    execute,
    run_parts,
)
from torchtitan_dmuon.config.errors import ConfigError  # noqa: E402

FORMAT = 1
CLOSING_SECONDS = 10.0
"""Of the whole time, kept for ending the last part."""

ROUNDS = 7
COMPILE_SECONDS = 10.0
"""For torch.compile of the reference for one shape, until one was seen to take longer."""

MODELS = (
    ("qwen2_5", "1.5B"),
    ("qwen2_5", "7B"),
    ("qwen2_5", "32B"),
    ("llama3", "3.2-3B"),
    ("llama3", "3.1-8B"),
)
MOE_SHAPES = ((2048, 2048), (1408, 2048), (2048, 1408), (5632, 2048), (2048, 5632), (60, 2048))
"""Qwen1.5-MoE-A2.7B, which the registry lacks: attention; gate and up, and down, of an expert and
of the shared expert; router. The paper (C.5, D.10) gives experts of 1408 x 2048, 60 per layer; the
shared expert's 5632 is the published config.json's. Its gate, 1 x 2048, is a vector to NS."""

TOY_SHAPES = ((64, 64), (48, 128), (128, 48))

KEYS = {
    "format": "version of this layout",
    "keys": "this table",
    "rehearsal": "true: toy sizes on a CPU; no figure means anything",
    "started": "UTC",
    "seconds_allowed": "of all parts together",
    "seconds": "taken so far",
    "finished": "false in the report of a run that was cut off",
    "parts": "by name, in the order in which they run",
    "parts.*.ok": "true, false, or null while the part runs",
    "parts.*.reason": "why it is not ok, or what else is to be known of it",
    "parts.*.seconds": "taken",
    "parts.*.bound_seconds": "after which the part is ended; null: it was not started",
    "parts.*.results": "what the part found, also if it was ended early",
    "parts.environment.results": "versions, device, nvidia_smi, commit (null: not known); doctor: "
    "what dmuon doctor --json prints",
    "parts.csrc.results": "by library seconds, to compile or find it and to load it; or off (torch "
    "has no NCCL that the kernels can use) or failed, with the reason",
    "parts.gpu_tests.results": "counts by outcome; failures: FAILED and ERROR lines of pytest",
    "parts.backends.results": "device; error_factor: largest allowed ratio; entries: for each "
    "symmetric product plain (errors of torch's product against float64 on the device: max over "
    "the largest element, rms over the rms) and backends (ratios of a backend's errors to those, "
    "or off or failed, with the reason)",
    "parts.newton_schulz.results": "product_tflops: measured rate of a large plain product; "
    "shapes: seconds of ours, over_floor (seconds over flops / rate), replayed (ours ran as a CUDA "
    "graph), by candidate seconds, over_ours (its time over ours, median within a round) and iqr; "
    "failed: by candidate; goals: met, missed, not asked for, not measured; compiled_reference: "
    "what became of gram-newton-schulz under torch.compile; summary: number of shapes by goal and "
    "verdict; choices: backends, with their times",
    "parts.training.results": "arguments: of the launcher; losses, step_seconds, tokens_per_second "
    "by step; median_step_seconds: without the first steps; peak_memory_gib, peak_reserved_gib",
}
"""What a report has; a * stands for any name."""


@dataclass(kw_only=True, slots=True)
class Options:
    """Check on one Hopper GPU, in minutes, what no CPU can show, and write one JSON report:
    versions, libraries of csrc/, GPU tests, symmetric products against float64, times of
    Newton-Schulz against its floor and against others, and 20 training steps.

    A part that does not fit into the time is left out, and the report says so. Exit status: 0 all
    parts are ok; 1 one is not, or was left out; 2 bad arguments or no GPU.
    """

    output: str = "device_check.json"
    """Report to write, ending in .json. The parts' own output goes beside it, ending in .log."""

    minutes: int = 5
    """Time for all parts together, 5 to 60."""

    rehearse: bool = False
    """Run the same parts on the CPU at toy sizes, to try this script; no figure means anything."""


# -------------------------------------------------------------------------------- 1. environment


def environment(context: Context, note: Note) -> Outcome:
    import torch

    from torchtitan_dmuon.optim.symmetric_matmul.identity import cpu_model, package_version

    packages = ("torchtitan", "quack-kernels", "nvidia-cutlass-dsl", "gram-newton-schulz", "triton")
    found: dict[str, Any] = {
        "commit": told(["git", "-C", str(ROOT), "rev-parse", "HEAD"]),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "CUDA": torch.version.cuda,
        "NCCL": None,
        "device": cpu_model(),
        **{name: package_version(name) or None for name in packages},
        "nvidia_smi": told(
            ["nvidia-smi", "--query-gpu=name,driver_version,power.limit,clocks.max.sm,memory.total"]
            + ["--format=csv"]
        ),
    }
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found |= {
            "NCCL": ".".join(map(str, torch.cuda.nccl.version())),
            "device": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "multiprocessors": properties.multi_processor_count,
        }
    note(found)
    doctor = subprocess.run(
        [sys.executable, "-m", "torchtitan_dmuon.cli", "doctor", "--json"],
        check=False,
        stdout=subprocess.PIPE,
        text=True,
        timeout=context.seconds,
    )
    found["doctor"] = json.loads(doctor.stdout) if doctor.stdout else None
    note(found)
    if found["doctor"] is None:
        return False, f"dmuon doctor ended with status {doctor.returncode} and no report"
    return doctor.returncode == 0, "; ".join(found["doctor"]["problems"])


def told(command: list[str]) -> str | None:
    """Return what a program prints, or None if it can not be asked."""
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


# --------------------------------------------------------------------------------------- 2. csrc


def csrc(context: Context, note: Note) -> Outcome:
    """Compile all libraries side by side, or take them from the cache, and load those that load."""
    found: dict[str, dict[str, Any]] = {}
    with ThreadPoolExecutor() as pool:
        names = {pool.submit(made, make): name for name, make in libraries(context).items()}
        for task in as_completed(names):
            found[names[task]] = task.result()
            note(found)
    return judge_libraries(found)


def libraries(context: Context) -> dict[str, Callable[[], object]]:
    """Return what makes each library, by name."""
    import torch

    from torchtitan_dmuon.comm import gin, shm
    from torchtitan_dmuon.native.cuda import build_loopback
    from torchtitan_dmuon.native.torch_library import load_allocator

    common: dict[str, Callable[[], object]] = {"shm": shm.prepare, "allocator": load_allocator}
    if context.rehearse:
        return {**common, "loopback": lambda: build_loopback(None)}
    gpu = torch.device("cuda", 0)
    return {
        **common,
        "loopback": lambda: build_loopback(gin.architecture(gpu)),
        "gin": lambda: gin.prepare(gpu),
    }


def made(make: Callable[[], object]) -> dict[str, Any]:
    """Return the seconds that a library took, or why there is none."""
    from torchtitan_dmuon.native import NativeError
    from torchtitan_dmuon.native.cuda import NcclUnfit

    begin = time.perf_counter()
    try:
        make()
    except NcclUnfit as error:
        return {"off": str(error)}
    except NativeError as error:
        return {"failed": str(error)}
    return {"seconds": round(time.perf_counter() - begin, 1)}


def judge_libraries(found: Mapping[str, Mapping[str, Any]]) -> Outcome:
    failed = [f"{name}: {entry['failed']}" for name, entry in found.items() if "failed" in entry]
    off = [f"{name} is off: {entry['off']}" for name, entry in found.items() if "off" in entry]
    return not failed, "; ".join(failed + off)


# ---------------------------------------------------------------------------------- 3. GPU tests


def gpu_tests(context: Context, note: Note) -> Outcome:
    """Run pytest -m gpu, and count while it runs, so that a run that is ended leaves its counts."""
    where = ["tests/optim/test_symmetric_matmul.py"] if context.rehearse else []
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-v", "--tb=short", "--no-header"]
    counts: dict[str, int] = {}
    failures: list[str] = []
    with subprocess.Popen(
        [*command, "-p", "no:cacheprovider", *where],
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "200"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        for text in process.stdout:
            print(text, end="", flush=True)
            read_test_line(text, counts, failures)
            note({"counts": counts, "failures": failures})
    return judge_tests(process.returncode, counts, rehearse=context.rehearse)


def read_test_line(text: str, counts: dict[str, int], failures: list[str]) -> None:
    """Count a line of pytest -v if it tells of a test; keep it if it says what failed."""
    if found := re.match(r"\S+::.* (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b", text):
        outcome = found[1].lower()
        counts[outcome] = counts.get(outcome, 0) + 1
    elif re.match(r"(FAILED|ERROR) \S", text):
        failures.append(text.strip())


def judge_tests(status: int, counts: dict[str, int], *, rehearse: bool) -> Outcome:
    if status != 0:
        return False, f"pytest ended with status {status}"
    if not counts.get("passed") and not rehearse:
        return False, "no test ran to its end"
    skipped = counts.get("skipped", 0)
    return True, f"{skipped} skipped" if skipped else ""


# ----------------------------------------------------------------------------------- 4. backends


def shapes_of(context: Context) -> list[tuple[int, int]]:
    """Return the distinct shapes to check, those of the largest Newton-Schulz first."""
    if context.rehearse:
        return list(TOY_SHAPES)
    from torchtitan_dmuon.bench.newton_schulz import model_shapes
    from torchtitan_dmuon.optim.newton_schulz import flops

    shapes = dict.fromkeys([*model_shapes(MODELS), *MOE_SHAPES])
    return sorted(shapes, key=lambda shape: flops(*shape), reverse=True)


def backends(context: Context, note: Note) -> Outcome:
    import torch

    from torchtitan_dmuon.bench.newton_schulz import symmetric_errors, symmetric_problems
    from torchtitan_dmuon.optim.symmetric_matmul import backends as all_backends
    from torchtitan_dmuon.optim.symmetric_matmul.check import ERROR_FACTOR

    device = torch.device("cpu" if context.rehearse else "cuda:0")
    entries: list[dict[str, Any]] = []
    shapes = shapes_of(context)
    # float16 is what Newton-Schulz computes in on GPUs; bfloat16 is what can be asked for.
    for dtype in (torch.float16, torch.bfloat16):
        for problem in symmetric_problems(shapes, dtype):
            entries.append(symmetric_errors(problem, device, all_backends()))
            note({"device": str(device), "error_factor": ERROR_FACTOR, "entries": entries})
    return judge_backends(entries)


def judge_backends(entries: Sequence[dict[str, Any]]) -> Outcome:
    wrong = [
        f"{name} for {entry['problem']}"
        for entry in entries
        for name, found in entry["backends"].items()
        if "failed" in found or found.get("ok") is False
    ]
    return not wrong, f"failed or not exact enough: {', '.join(wrong)}" if wrong else ""


# ------------------------------------------------------------------------------ 5. Newton-Schulz


def newton_schulz(context: Context, note: Note) -> Outcome:
    """Time every shape; then, as far as time goes, against the reference under torch.compile."""
    import torch

    from torchtitan_dmuon.bench.newton_schulz import add_compiled, matmul_rate, tally, time_shape
    from torchtitan_dmuon.optim import symmetric_matmul

    end = time.monotonic() + context.seconds
    device = torch.device("cpu" if context.rehearse else "cuda:0")
    # Choices are made anew: those on disk may be of another state of the machine.
    symmetric_matmul.configure(folder=context.work / "choices")
    shapes: list[dict[str, Any]] = []
    rate = matmul_rate(torch.float16, device, 128 if context.rehearse else None)
    found: dict[str, Any] = {"product_tflops": rate / 1e12, "shapes": shapes}
    for shape in shapes_of(context):
        shapes.append(time_shape(shape, device, rate, ROUNDS))
        note(found | {"summary": tally(shapes)})
    longest = COMPILE_SECONDS
    for entry in shapes:
        begin = time.monotonic()
        if "goals" in entry and end - begin > 1.5 * longest:
            add_compiled(entry, device, ROUNDS)
            longest = max(longest, time.monotonic() - begin)
            note(found | {"summary": tally(shapes)})
    choices = symmetric_matmul.selector().choices(device)
    found["choices"] = {key: choice.as_json() for key, choice in choices.items()}
    note(found | {"summary": tally(shapes)})
    broken = [f"{e['rows']}x{e['columns']}" for e in shapes if "goals" not in e]
    return not broken, f"ours fails for {', '.join(broken)}" if broken else ""


# ----------------------------------------------------------------------------------- 6. training


def training_arguments(context: Context) -> list[str]:
    """Return the launcher's: mode owner works on one rank as on many, with all owners there."""
    shared = ["--dataloader.dataset", "random_tokens", "--metrics.log_freq", "1"]
    shared += ["--checkpoint.enable", "False", "--dump_folder", str(context.work / "training")]
    shared += ["--training.mixed_precision_param", "bfloat16", "--lr_scheduler.warmup_steps", "2"]
    if context.rehearse:
        toy = ["--config", "debug_owner_fsdp_z2.toml", "--device", "cpu"]
        toy += ["--parallelism.data_parallel_shard_degree", "1", "--training.steps", "3"]
        toy += ["--training.seq_len", "32", "--training.local_batch_size", "1"]
        # Measuring costs on a CPU takes longer than the steps.
        return [*toy, *shared, "--parallelism.owner_cost", "model"]
    # sdpa: compiling flex attention would take as long as the rest; a GPU test covers it.
    real = ["--config", "qwen1.5b_fsdp_z2.toml", "--model.flavor", "0.5B", "--hf_assets_path", ""]
    real += ["--model.attn_backend", "sdpa", "--training.steps", "20"]
    # Without recomputation two sequences fit into 80 GB.
    return [*real, *shared, "--training.local_batch_size", "2"]


def training(context: Context, note: Note) -> Outcome:
    arguments = training_arguments(context)
    found: dict[str, Any] = {"arguments": arguments}
    note(found)
    done = subprocess.run(
        [sys.executable, "-P", "-m", "torchtitan_dmuon.launch", *arguments],
        check=False,
        env={**os.environ, "NGPU": "1"},
        # The bound of the part comes first, and lets the launcher end its rank.
        timeout=context.seconds + 30,
    )
    found |= read_curves(context.work / "training" / "tb")
    note(found)
    steps = int(arguments[arguments.index("--training.steps") + 1])
    return judge_training(done.returncode, found["losses"], steps)


def read_curves(folder: Path) -> dict[str, Any]:
    """Return losses, times and memory from the TensorBoard events of a job."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    curves: dict[str, list[float]] = {}
    for run in sorted(folder.iterdir()) if folder.is_dir() else []:
        events = EventAccumulator(str(run), size_guidance={"scalars": 0})
        events.Reload()
        curves = {tag: [e.value for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    seconds = curves.get("time_metrics/end_to_end(s)", [])
    # The first steps measure, compile, record graphs and fill the allocator.
    steady = seconds[3:] or seconds
    return {
        "losses": curves.get("loss_metrics/global_avg_loss", []),
        "step_seconds": seconds,
        "median_step_seconds": statistics.median(steady) if steady else None,
        "tokens_per_second": curves.get("throughput(tps)", []),
        "peak_memory_gib": max(curves.get("memory/max_active(GiB)", []), default=None),
        "peak_reserved_gib": max(curves.get("memory/max_reserved(GiB)", []), default=None),
    }


def judge_training(status: int, losses: Sequence[float], steps: int) -> Outcome:
    if status != 0:
        return False, f"the launcher ended with status {status}"
    if len(losses) != steps or not all(map(math.isfinite, losses)):
        return False, f"expected {steps} finite losses, got {list(losses)}"
    return True, ""


PARTS = (
    Part("environment", environment, least=15),
    Part("csrc", csrc, least=30),
    Part("gpu_tests", gpu_tests, least=45),
    Part("backends", backends, least=40),
    Part("newton_schulz", newton_schulz, least=60),
    Part("training", training, least=60),
)

# ------------------------------------------------------------------------------------- arguments


def check_options(options: Options) -> Path:
    """Return the report's path. Raises ConfigError."""
    # The parts need more than four minutes at least.
    if not 5 <= options.minutes <= 60:
        raise ConfigError(f"--minutes: expected a number from 5 to 60, got {options.minutes}")
    path = Path(options.output).absolute()
    if path.suffix != ".json":
        raise ConfigError(f'--output: expected a file that ends in .json, got "{options.output}"')
    if not path.parent.is_dir():
        raise ConfigError(f"--output: no such folder: {path.parent}")
    return path


def need_gpu() -> None:
    """Raise ConfigError if there is none."""
    import torch

    if not torch.cuda.is_available():
        raise ConfigError(
            "needs a CUDA GPU (found none); --rehearse runs the same parts on the CPU at toy sizes"
        )


def run(path: Path, budget: Budget, *, rehearse: bool) -> int:
    """Run all parts and write the report; return the exit status."""
    report = Report(path, budget, {"format": FORMAT, "keys": KEYS, "rehearsal": rehearse})
    log = path.with_suffix(".log")
    log.unlink(missing_ok=True)
    work = Path(tempfile.mkdtemp(prefix="device_check_"))
    context = Context(rehearse, work, budget.seconds)
    try:
        run_parts(PARTS, context, report, budget, lambda p, c: execute(p, c, report, log))
    except KeyboardInterrupt:
        print(f"cut off; {path} has what was found until then", file=sys.stderr)
        return 130
    finally:
        shutil.rmtree(work, ignore_errors=True)
    print(f"{path}{' (a rehearsal: no figure in it means anything)' if rehearse else ''}")
    return 0 if all(entry["ok"] for entry in report.content["parts"].values()) else 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit status."""
    options = tyro.cli(Options, args=arguments)
    budget = Budget(60.0 * options.minutes - CLOSING_SECONDS)
    try:
        path = check_options(options)
        if not options.rehearse:
            need_gpu()
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    # What parts start uses this checkout, too, and sees no GPU in a rehearsal.
    others = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *([others] if others else [])])
    if options.rehearse:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # device_check.sh ends a run that is too long: as with Ctrl-C, what is running is ended.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    return run(path, budget, rehearse=options.rehearse)


if __name__ == "__main__":
    sys.exit(main())
