"""`dmuon costs`: measure the table of times that owners are balanced by."""

from __future__ import annotations

import platform
import re
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torchtitan_dmuon.config.errors import ConfigError
from torchtitan_dmuon.ownership import CostTable, measure
from torchtitan_dmuon.patching import require_patched_torchtitan

if TYPE_CHECKING:
    import torch

    from torchtitan_dmuon.config.schema import JobConfig
    from torchtitan_dmuon.optim.matrix_optimizer import MatrixOptimizer

Shape = tuple[int, int]


@dataclass(kw_only=True, slots=True)
class Options:
    """Time a matrix optimizer's update on this machine, once per shape, and write the cost table
    that owners are balanced by.

    A job with --parallelism.owner_cost FILE then has the same owners in every run, and need not
    measure at start. Measured is one process alone; on a CPU set OMP_NUM_THREADS to the threads of
    one rank. Nothing is written before all shapes are done.
    """

    shapes: list[str] = field(default_factory=list)
    """
    Comma-separated: matrices as ROWSxCOLUMNS, e.g. 1536x8960, or all of a model as FAMILY:FLAVOR,
    e.g. qwen2_5:1.5B.
    """

    config: str = ""
    """
    Job config whose model's matrices are measured, with its optimizer's options if it has owners:
    a path, or a file of train_configs/. Options --section.key value change it.
    """

    output: str = ""
    """File to write, ending in .json."""

    algorithm: str = ""
    """Matrix optimizer to time, with its default options. Empty: that of the job, or else muon."""

    device: Literal["auto", "cuda", "cpu"] = "auto"
    """Where. auto: a GPU if there is one."""

    repeats: int = 5
    """Timed repeats of each shape, of which the median counts."""


def check_options(options: Options, job_options: Sequence[str]) -> None:
    """Check what needs no torch. Raises ConfigError."""
    if not options.shapes and not options.config:
        raise ConfigError("--shapes: expected shapes, e.g. 1536x8960,qwen2_5:1.5B, or --config")
    if job_options and not options.config:
        raise ConfigError(f"{job_options[0]}: changes a job; give its --config too")
    if options.repeats < 1:
        raise ConfigError(f"--repeats: expected at least 1, got {options.repeats}")
    output = Path(options.output)
    if output.suffix != ".json":
        raise ConfigError(f'--output: expected a file that ends in .json, got "{options.output}"')
    if not output.resolve().parent.is_dir():
        raise ConfigError(f"--output: no such folder: {output.resolve().parent}")


def parse_shapes(texts: Iterable[str]) -> tuple[list[Shape], list[tuple[str, str]]]:
    """Part --shapes into shapes and models (family, flavor).

    Raises:
        ConfigError: neither the one nor the other.
    """
    shapes, models = [], []
    for text in texts:
        if match := re.fullmatch(r"([1-9]\d{0,8})x([1-9]\d{0,8})", text):
            shapes.append((int(match[1]), int(match[2])))
        elif ":" in text:
            family, _, flavor = text.partition(":")
            models.append((family, flavor))
        else:
            raise ConfigError(
                f'--shapes: "{text}" is neither ROWSxCOLUMNS, e.g. 1536x8960, nor FAMILY:FLAVOR, '
                "e.g. qwen2_5:1.5B"
            )
    return shapes, models


def prepare(options: Options, job_options: Sequence[str]) -> tuple[list[Shape], MatrixOptimizer]:
    """Return the distinct shapes to measure, sorted, and the optimizer.

    Raises:
        ConfigError, PatchError: what is wrong, in one line.
    """
    shapes, models = parse_shapes(options.shapes)
    job, per_head = None, False
    if options.config:
        require_patched_torchtitan()
        # Imported late, here and below: they import torchtitan, whose patches come first.
        from torchtitan_dmuon.config.manager import load_job

        job = load_job(["--config", options.config, *job_options]).config
        models.append((job.model.name, job.model.flavor))
        per_head = job.optimizer.per_head
    if models:
        require_patched_torchtitan()
        from torchtitan_dmuon.models.matrices import model_matrices
        from torchtitan_dmuon.models.registry import get_model_spec

        for name, flavor in models:
            spec = get_model_spec(name, flavor, attn_backend="sdpa")
            shapes += [matrix.shape for matrix in model_matrices(spec, per_head=per_head)]
    return sorted(set(shapes)), _rule(options.algorithm, job)


def _rule(algorithm: str, job: JobConfig | None) -> MatrixOptimizer:
    from torchtitan_dmuon.optim.matrix_optimizer import find

    try:
        if algorithm or job is None or job.optimizer.name != "DMuon":
            return find(algorithm or "muon")()
        from torchtitan_dmuon.config.algorithm import rule_of

        return rule_of(job.optimizer)
    except ValueError as e:
        raise ConfigError(str(e)) from e


def measure_table(
    shapes: Sequence[Shape], rule: MatrixOptimizer, device: torch.device, repeats: int
) -> CostTable:
    """Time every shape, with progress on stderr.

    Args:
        shapes: Distinct, sorted.
        rule: The optimizer, with its options.
        device: Where.
        repeats: Of each shape; the median counts.
    """
    start = time.monotonic()
    work = {shape: rule.flops(*shape) for shape in shapes}
    done: list[Shape] = []

    def run(rows: int, columns: int) -> float:
        seconds = rule.measure_seconds(rows, columns, device, repeats=repeats)
        done.append((rows, columns))
        spent = time.monotonic() - start
        # What is left takes as long as what is done, by operations: small shapes come first.
        left = spent * (sum(work.values()) / sum(work[shape] for shape in done) - 1)
        print(
            f"[{spent:4.0f} s] {len(done)} of {len(shapes)}: {rows} x {columns}: "
            f"{1e3 * seconds:.3f} ms; about {left:.0f} s left",
            file=sys.stderr,
            flush=True,
        )
        return seconds

    measured = measure(shapes, run, rule.label())
    about = describe(rule, device, repeats)
    return CostTable(measured.seconds, f"measured on {about['device']}", rule.label(), about)


def describe(rule: MatrixOptimizer, device: torch.device, repeats: int) -> dict[str, Any]:
    """Return what a table says of its measurement: device, dtype, options, versions, date, method.

    Options are as text, but for learning rate and weight decay, which take no time.
    """
    import torch

    from torchtitan_dmuon.optim.newton_schulz import default_dtype
    from torchtitan_dmuon.optim.symmetric_matmul.identity import cpu_model

    options = {f.name: getattr(rule, f.name) for f in fields(rule)}
    # Rules without Newton-Schulz compute in the dtype of their state.
    dtype = options["ns_dtype"] or default_dtype(device) if "ns_dtype" in options else torch.float32
    name, workers = cpu_model(), f"{torch.get_num_threads()} threads"
    if device.type == "cuda":
        name, workers = torch.cuda.get_device_name(device), "one GPU"
    return {
        "device": name,
        "dtype": str(dtype).removeprefix("torch."),
        "options": {k: str(v) for k, v in options.items() if k not in ("lr", "weight_decay")},
        "versions": versions(),
        "date": datetime.now(UTC).date().isoformat(),
        "method": f"dmuon costs: median of {repeats} timings of an update after two that warm up; "
        f"one process, {workers}",
    }


def versions() -> dict[str, str]:
    """Return the versions of what decides how long an update takes; leave out what is missing."""
    found = {"python": platform.python_version()}
    for name in ("torchtitan_dmuon", "torch", "quack-kernels"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def run(options: Options, job_options: Sequence[str], arguments: Sequence[str]) -> None:
    """Measure and write the table.

    Args:
        options: The command's options.
        job_options: Options of the job that `--config` names.
        arguments: All of them, as given.

    Raises:
        ConfigError, PatchError: before anything is measured.
    """
    check_options(options, job_options)
    shapes, rule = prepare(options, job_options)
    import torch

    available = torch.cuda.is_available()
    if options.device == "cuda" and not available:
        raise ConfigError("--device: cuda is asked for, but there is no GPU; expected auto or cpu")
    kind = options.device if options.device != "auto" else "cuda" if available else "cpu"
    table = measure_table(shapes, rule, torch.device(kind), options.repeats)
    table.save(options.output)
    for (rows, columns), seconds in table.seconds.items():
        print(f"{rows:>8} x {columns:<8} {1e3 * seconds:12.3f} ms")
    print(f"{options.output}: {len(shapes)} shapes, {table.source}, {table.about['dtype']}")
