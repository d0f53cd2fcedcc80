"""`dmuon doctor`: what is installed here, what works, which kernels were chosen, a job's pool."""

from __future__ import annotations

import json
import os
import platform
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torchtitan_dmuon.config.errors import ConfigError
from torchtitan_dmuon.memory import POOL_FILE
from torchtitan_dmuon.patching import Installation, PatchError, require_patched_torchtitan

if TYPE_CHECKING:
    import torch

    from torchtitan_dmuon.optim.symmetric_matmul import Choice

OPTIONAL_PACKAGES = (
    "quack-kernels",
    "nvidia-cutlass-dsl",
    "nvidia-nccl-cu12",
    "nvidia-nccl-cu13",
)

_DTYPES = ("float32", "bfloat16", "float16")
_SHAPE = (1, 4096, 4096)
# Whether a backend is on is asked for a product of this (batch, m, k), which all of them take.

_MAX_SIZE = 2**20
# Of a side of a measured matrix: more is a slip, and would end in the machine's memory.


@dataclass(kw_only=True, slots=True)
class Options:
    """Show versions, devices, whether the operators of line D can run, the kernels for symmetric
    products with the reason why one is off, and which of them was chosen for which shape.

    Newton-Schulz spends its time on symmetric products. The first time a shape appears on a kind
    of device, every kernel that can be used is checked and timed, and the fastest is kept in a file
    that all later runs read. To have it done before a job starts:

    dmuon doctor --measure 1536x8960,1536x1536

    On a CPU choices hold for a number of threads: set OMP_NUM_THREADS to those of one rank of the
    job, which are cores divided by ranks unless the job sets it.

    Exit status 0: nothing is broken; 1: something that is installed does not work.
    """

    json: bool = False
    """Print one JSON object instead of text."""

    measure: list[str] = field(default_factory=list)
    """Comma-separated shapes of matrices, rows x columns as in 1536x8960, or batch x rows x columns
    as in 60x1408x2048: measure the products of their Newton-Schulz now, unless that was done."""

    dtype: Literal["float16", "bfloat16", "float32", "float64"] | None = None
    """Of what is measured. None: what Newton-Schulz computes in on this device."""

    job: str = ""
    """Folder of a job (its dump_folder): show what its symmetric pool takes on each rank, by part.
    Jobs on the operators (line D) write it when the pool opens, in their second step."""


def parse_shape(text: str) -> tuple[int | None, int, int]:
    """Return (batch or None, rows, columns) of a shape like 1536x8960 or 60x1408x2048.

    Raises:
        ConfigError: it is none.
    """
    match = re.fullmatch(r"\s*(?:(\d+)x)?(\d+)x(\d+)\s*", text, re.ASCII)
    sizes = [int(size) for size in match.groups() if size is not None] if match else []
    if match is None or not all(1 <= size <= _MAX_SIZE for size in sizes):
        raise ConfigError(
            f"--measure: expected ROWSxCOLUMNS such as 1536x8960, or BATCHxROWSxCOLUMNS, with "
            f'sizes from 1 to {_MAX_SIZE}, got "{text}"'
        )
    return (sizes[0] if len(sizes) == 3 else None, sizes[-2], sizes[-1])


def run(options: Options, job_options: Sequence[str], arguments: Sequence[str]) -> None:
    """Print the report; measure before if asked to.

    Args:
        options: The command's options.
        job_options: Of a job: there is none here.
        arguments: All of them; not used.

    Raises:
        ConfigError: a bad shape, or options of a job.
        SystemExit: status 1 if something that is installed does not work.
    """
    if job_options:
        raise ConfigError(f"{job_options[0]}: doctor has no job, and takes none of its options")
    shapes = [parse_shape(text) for text in options.measure]
    if shapes:
        _measure(shapes, options.dtype)
    pool = read_pool(Path(options.job)) if options.job else None
    report, problems = collect()
    if pool is not None:
        report["pool"] = pool
    if options.json:
        print(json.dumps({**report, "problems": problems}))
    else:
        print(as_text(report, problems))
    if problems:
        raise SystemExit(1)


def collect() -> tuple[dict[str, Any], list[str]]:
    """Return the report, a table of plain values by section, and what is broken, in words."""
    problems: list[str] = []
    report = {name: section(problems) for name, section in SECTIONS.items()}
    return report, problems


def read_pool(folder: Path) -> dict[str, int]:
    """Return the bytes of a job's pool on a rank, by part.

    Raises:
        ConfigError: the folder has no such file, or not one of ours.
    """
    path = folder / POOL_FILE
    try:
        parts = json.loads(path.read_text())["bytes"]
        if not all(type(nbytes) is int and nbytes >= 0 for nbytes in parts.values()):
            raise ValueError("bytes are whole numbers")
        return {str(part): nbytes for part, nbytes in parts.items()}
    except FileNotFoundError:
        raise ConfigError(
            f'--job: {path} does not exist; jobs with communication = "operators" write it in '
            "their second step, into their dump_folder"
        ) from None
    except OSError as error:
        raise ConfigError(f"--job: {path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ConfigError(f"--job: {path} is damaged: expected bytes by part") from None


def as_text(report: dict[str, Any], problems: Sequence[str]) -> str:
    """Lay a report out for reading."""
    lines: list[str] = []
    for name, content in report.items():
        lines += [_TITLES.get(name, name.replace("_", " ")), *_LAYOUTS[name](content), ""]
    lines += ["problems", *(f"  {text}" for text in problems)] if problems else ["no problems"]
    return "\n".join(lines)


def _software(problems: list[str]) -> dict[str, Any]:
    import torch

    from torchtitan_dmuon.optim.symmetric_matmul.identity import package_version

    packages = {name: package_version(name) or None for name in OPTIONAL_PACKAGES}
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "torchtitan": None,
        "torchtitan patched": False,
        **packages,
    }
    if torch.cuda.is_available():
        found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    try:
        Installation()
        found["torchtitan"] = package_version("torchtitan")
        require_patched_torchtitan()
        found["torchtitan patched"] = True
    except PatchError as error:
        problems.append(str(error))
    return found


def _devices(problems: list[str]) -> list[dict[str, Any]]:
    import torch

    from torchtitan_dmuon.optim.symmetric_matmul.identity import cpu_model, cpu_units

    devices: list[dict[str, Any]] = [
        {
            "device": "cpu",
            "name": cpu_model(),
            "units": cpu_units(),
            "threads": torch.get_num_threads(),
            "cores": len(os.sched_getaffinity(0))
            if hasattr(os, "sched_getaffinity")
            else os.cpu_count(),
        }
    ]
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        devices.append(
            {
                "device": f"cuda:{index}",
                "name": properties.name,
                "units": [f"sm_{properties.major}{properties.minor}"],
                "memory_gib": round(properties.total_memory / 2**30, 1),
            }
        )
    return devices


def _operators(problems: list[str]) -> dict[str, str | None]:
    """Return why a fabric of the operators is off; None: it is on."""
    import torch

    from torchtitan_dmuon.comm.operators_communicator import lack_of

    off = {"shm": lack_of(torch.device("cpu")), "gin": "no CUDA GPU here"}
    if torch.cuda.is_available():
        off["gin"] = lack_of(torch.device("cuda", 0))
    return off


def _kinds_of_device() -> list[torch.device]:
    """Return the CPU, and one GPU of each kind: choices hold for a kind."""
    import torch

    kinds = {"": torch.device("cpu")}
    for index in range(torch.cuda.device_count()):
        kinds.setdefault(torch.cuda.get_device_name(index), torch.device("cuda", index))
    return list(kinds.values())


def _backends(problems: list[str]) -> list[dict[str, Any]]:
    import torch

    from torchtitan_dmuon.optim.symmetric_matmul import selector

    rows = []
    for backend in selector().backends:
        broken = backend.broken()
        if broken is not None:
            problems.append(f"{backend.name}: {broken}")
        for device in _kinds_of_device():
            off = {
                name: backend.unavailable(device, getattr(torch, name), _SHAPE) for name in _DTYPES
            }
            rows.append(
                {"backend": backend.name, "device": str(device), "off": off, "broken": broken}
            )
    return rows


def _choices(problems: list[str]) -> list[dict[str, Any]]:
    from torchtitan_dmuon.optim.symmetric_matmul import selector

    return [
        {
            "device": str(device),
            "file": str(selector().store(device).path),
            "state": selector().store(device).read()[1],
            "choices": {
                key: choice.as_json() for key, choice in sorted(selector().choices(device).items())
            },
        }
        for device in _kinds_of_device()
    ]


def _matrix_optimizers(problems: list[str]) -> list[str]:
    from torchtitan_dmuon.optim.matrix_optimizer import registered

    return list(registered())


def _cost_tables(problems: list[str]) -> list[str]:
    from torchtitan_dmuon.ownership.cost import shipped_tables

    return list(shipped_tables())


SECTIONS: dict[str, Callable[[list[str]], Any]] = {
    "software": _software,
    "devices": _devices,
    "operators": _operators,
    "backends": _backends,
    "choices": _choices,
    "matrix_optimizers": _matrix_optimizers,
    "cost_tables": _cost_tables,
}
"""What the report has; each is given the list of problems, to which it adds what is broken."""

_TITLES = {
    "operators": "operators of line D",
    "pool": "symmetric pool on each rank",
    "backends": "kernels for symmetric products",
    "choices": "chosen kernels",
    "cost_tables": "cost tables of Newton-Schulz that are shipped",
}


def _software_lines(found: dict[str, Any]) -> list[str]:
    said = {True: "yes", False: "no", None: "not installed"}
    return [
        f"  {name:<20} {said[value] if value is None or isinstance(value, bool) else value}"
        for name, value in found.items()
    ]


def _device_lines(devices: list[dict[str, Any]]) -> list[str]:
    lines = []
    for device in devices:
        more = (
            f"{device['threads']} torch threads on {device['cores']} cores"
            if "threads" in device
            else f"{device['memory_gib']} GiB"
        )
        units = ", ".join(device["units"])
        lines.append(f"  {device['device']:<20} {device['name']} ({units}), {more}")
    return lines


def _operator_lines(off: dict[str, str | None]) -> list[str]:
    of = {"shm": "CPUs", "gin": "GPUs"}
    return [
        f"  {fabric:<20} {of[fabric]:<8} {'on' if reason is None else f'off: {reason}'}"
        for fabric, reason in off.items()
    ]


def _pool_lines(parts: dict[str, int]) -> list[str]:
    rows = {**parts, "all": sum(parts.values())}
    return [f"  {part:<20} {nbytes / 2**20:10.2f} MiB" for part, nbytes in rows.items()]


def _backend_lines(rows: list[dict[str, Any]]) -> list[str]:
    lines = []
    for row in rows:
        reasons: dict[str | None, list[str]] = {}
        for dtype, reason in row["off"].items():
            reasons.setdefault(reason, []).append(dtype)
        said = []
        for reason, dtypes in reasons.items():
            kinds = f" for {', '.join(dtypes)}" if len(reasons) > 1 else ""
            said.append(f"on{kinds}" if reason is None else f"off{kinds}: {reason}")
        lines.append(f"  {row['backend']:<24} {row['device']:<8} {'; '.join(said)}")
    return lines


def _choice_lines(files: list[dict[str, Any]]) -> list[str]:
    lines = []
    for kept in files:
        lines.append(f"  {kept['device']}: {kept['file']} ({kept['state']})")
        for key, choice in kept["choices"].items():
            seconds = choice["seconds"]
            plain = seconds.get("plain")
            told = [
                f"{name} {value * 1000:.3g} ms"
                + (f" ({plain / value:.2f}x the speed of plain)" if plain and value else "")
                for name, value in sorted(seconds.items(), key=lambda item: item[1])
            ]
            told += [f"{name} {reason}" for name, reason in choice["dropped"].items()]
            lines.append(f"    {key}: {choice['backend']}")
            lines += [f"      {text}" for text in told or ["not measured: too little memory"]]
    return lines


def _name_lines(names: list[str]) -> list[str]:
    return [f"  {name}" for name in names]


_LAYOUTS: dict[str, Callable[[Any], list[str]]] = {
    "software": _software_lines,
    "devices": _device_lines,
    "operators": _operator_lines,
    "pool": _pool_lines,
    "backends": _backend_lines,
    "choices": _choice_lines,
    "matrix_optimizers": _name_lines,
    "cost_tables": _name_lines,
}


def _measure(shapes: Sequence[tuple[int | None, int, int]], dtype_name: str | None) -> None:
    """Choose kernels for the Newton-Schulz of each shape by running it, and say so on stderr."""
    import torch

    from torchtitan_dmuon.optim.newton_schulz import default_dtype, newton_schulz
    from torchtitan_dmuon.optim.symmetric_matmul import selector

    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    dtype = default_dtype(device) if dtype_name is None else getattr(torch, dtype_name)
    for shape in shapes:
        sizes = [size for size in shape if size is not None]
        label = f"{'x'.join(map(str, sizes))} {str(dtype).removeprefix('torch.')} on {device}"
        print(f"{label} ... ", end="", file=sys.stderr, flush=True)
        before = selector().choices(device)
        with torch.no_grad():
            newton_schulz(torch.randn(sizes, device=device), dtype=dtype)
        after = selector().choices(device)
        new = [key for key in after if key not in before]
        print(f"{len(new)} chosen now" if new else "nothing to choose", file=sys.stderr)
        for key in new:
            print(f"  {key}: {_outcome(after[key])}", file=sys.stderr)


def _outcome(choice: Choice) -> str:
    if choice.backend not in choice.seconds:
        return f"{choice.backend} (not measured)"
    return f"{choice.backend}, {choice.seconds[choice.backend] * 1000:.3g} ms"
