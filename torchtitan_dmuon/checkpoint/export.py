"""`dmuon export` and `dmuon import`: checkpoints to Hugging Face folders and back."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from torchtitan_dmuon.config.errors import ConfigError
from torchtitan_dmuon.patching import require_patched_torchtitan

if TYPE_CHECKING:
    from torchtitan_dmuon.checkpoint.archive import Archive
    from torchtitan_dmuon.checkpoint.hf_export import Shard
    from torchtitan_dmuon.checkpoint.hf_model import HFModel
    from torchtitan_dmuon.config.schema import JobConfig

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


@dataclass(kw_only=True, slots=True)
class ExportOptions:
    """Write a checkpoint's model as a Hugging Face folder: safetensors, config.json, tokenizer.

    The folder loads with transformers (AutoModelForCausalLM.from_pretrained). One process reads
    and writes tensor by tensor, on any machine, whatever cluster wrote the checkpoint; it needs
    memory for one file of the result and two more copies of the largest tensor. The folder
    appears when it is whole.

    One checkpoint: dmuon export outputs/debug_owner_hsdp_z3/checkpoint/step-120 --to hf_model

    The newest: dmuon export outputs/debug_owner_hsdp_z3/checkpoint --to hf_model --dtype bfloat16
    """

    checkpoint: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="CKPT")] = ""
    """A checkpoint (.../checkpoint/step-N), or a folder of checkpoints: then its newest."""

    to: str = ""
    """Folder to write; it must not exist, or be empty."""

    config: str = ""
    """Job config that says which model it is (model.name, model.flavor) and where its tokenizer is
    (hf_assets_path): for checkpoints that do not say so themselves, such as torchtitan's own."""

    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Of the weights written. None: as in the checkpoint."""

    max_shard_size: str = "5GB"
    """Size of a file, as in 500MB or 2GiB; a larger tensor has a file of its own."""

    json: bool = False
    """Print the result as one JSON object: files, bytes, seconds, peak_bytes."""


@dataclass(kw_only=True, slots=True)
class ImportOptions:
    """Write a Hugging Face model as a checkpoint, step-0, from which jobs start.

    Reads safetensors only, tensor by tensor. Names, shapes and config.json are first compared with
    the model that the job config names, which is that of the jobs that will start from it.

    For the jobs of a config: dmuon import hf_model --to seed --config my.toml

    By the model's name: dmuon import hf_model --to seed --model.name qwen2_5 --model.flavor 7B

    Start from it: run_train.sh --config my.toml --checkpoint.enable --checkpoint.initial_load_path
    seed/step-0
    """

    folder: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="HF_DIR")] = ""
    """Hugging Face folder: *.safetensors, and config.json and tokenizer if there are any."""

    to: str = ""
    """Folder of checkpoints to write step-0 into; it may hold none yet."""

    config: str = ""
    """Job config with model.name and model.flavor; --model.name and --model.flavor win."""

    json: bool = False
    """Print the result as one JSON object: checkpoint, bytes, seconds, peak_bytes."""


def parse_size(text: str) -> int:
    """Return a size like 5GB (10^9) or 2GiB (2^30) in bytes.

    Raises:
        ConfigError: it is none.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].upper() not in _UNITS or float(match[1]) <= 0:
        raise ConfigError(f'--max_shard_size: expected a size such as 500MB or 5GB, got "{text}"')
    return max(1, int(float(match[1]) * _UNITS[match[2].upper()]))


class _Progress:
    """One line for each step of a transfer, with the time that is left, on stderr."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._said = 0.0

    def say(self, what: str, done: int, total: int, *, at_most_every: float = 0) -> None:
        seconds = time.monotonic() - self._start
        if done < total and seconds - self._said < at_most_every:
            return
        self._said = seconds
        left = f", {seconds * (total - done) / done:.0f} s left" if 0 < done < total else ""
        print(
            f"[{seconds:4.0f} s] {what}: {_size(done)} of {_size(total)}{left}",
            file=sys.stderr,
            flush=True,
        )


def _size(count: float) -> str:
    return f"{count / 1e9:,.2f} GB" if count >= 1e9 else f"{count / 1e6:,.1f} MB"


def _required(command: str, what: str, value: str, to: str) -> None:
    usage = f"dmuon {command} {what} --to DIR (see --help)"
    if not value:
        raise ConfigError(f"expected {what}: {usage}")
    if not to:
        raise ConfigError(f"expected --to: {usage}")


def _job(config: str, job_options: Sequence[str]) -> JobConfig | None:
    """Return the job that --config and options of the job describe; None if there are neither."""
    if not config and not job_options:
        return None
    from torchtitan_dmuon.config.manager import load_job

    chosen = ["--config", config] if config else []
    return load_job([*chosen, *job_options]).config


def find_archive(path: Path) -> Archive:
    """Open a checkpoint, or the newest complete one of a folder.

    Raises:
        CheckpointError: there is none; the message names those that there are.
    """
    from torchtitan_dmuon.checkpoint.archive import Archive
    from torchtitan_dmuon.checkpoint.errors import CheckpointError
    from torchtitan_dmuon.checkpoint.folder import INDEX, CheckpointFolder

    if (path / INDEX).is_file():
        return Archive.open(path)
    steps = CheckpointFolder(path).complete()
    if steps:
        return Archive.open(path / f"step-{steps[-1]}")
    if beside := CheckpointFolder(path.parent).complete():
        names = ", ".join(f"step-{step}" for step in beside)
        raise CheckpointError(f"{path}: no complete checkpoint; in {path.parent} are: {names}")
    inside = path / "checkpoint"
    hint = f"; did you mean {inside}?" if CheckpointFolder(inside).complete() else ""
    raise CheckpointError(f"{path}: no complete checkpoint there{hint or ' (step-N)'}")


def model_of(archive: Archive, job: JobConfig | None) -> HFModel:
    """Return the model of a checkpoint, as its manifest or else the job says.

    Raises:
        ConfigError: neither says, or they disagree.
    """
    from torchtitan_dmuon.checkpoint.errors import CheckpointError
    from torchtitan_dmuon.checkpoint.hf_model import HFModel

    said: dict[str, Any] | None = (archive.manifest or {}).get("model")
    if said is None and job is None:
        raise CheckpointError(
            f"{archive.path}: does not say which model it is of; add --config JOB.toml, the job "
            "config that it was trained with"
        )
    if said is None:
        assert job is not None
        return HFModel.of(job.model.name, job.model.flavor)
    model = said["name"], said["flavor"]
    if job is not None and (job.model.name, job.model.flavor) != model:
        raise CheckpointError(
            f"{archive.path}: is of the model {' '.join(model)}, not of {job.model.name} "
            f"{job.model.flavor}, which the job config names"
        )
    return HFModel.of(*model)


def _tokenizer(archive: Archive, job: JobConfig | None) -> Path | None:
    from torchtitan_dmuon.checkpoint.archive import TOKENIZER

    own = archive.path / TOKENIZER
    if own.is_dir():
        return own
    folder = Path(job.hf_assets_path) if job is not None and job.hf_assets_path else None
    return folder if folder is not None and folder.is_dir() else None


def run_export(
    options: ExportOptions, job_options: Sequence[str], arguments: Sequence[str]
) -> None:
    """Export a checkpoint and print what was written.

    Args:
        options: The command's options.
        job_options: Options of the job, as for run_train.sh.
        arguments: All of them; not used.

    Raises:
        ConfigError, PatchError: what is wrong, in one line.
    """
    _required("export", "CKPT", options.checkpoint, options.to)
    max_bytes = parse_size(options.max_shard_size)
    require_patched_torchtitan()
    import torch

    from torchtitan_dmuon.checkpoint.hf_export import export, plan, rebuilt_by_transformers
    from torchtitan_dmuon.checkpoint.hf_folder import Usage, refuse_existing

    to = Path(options.to).expanduser().absolute()
    refuse_existing(to)
    archive = find_archive(Path(options.checkpoint).expanduser())
    job = _job(options.config, job_options)
    model = model_of(archive, job)
    dtype = getattr(torch, options.dtype) if options.dtype else None
    shards = plan(archive, model, dtype, max_bytes)
    tokenizer = _tokenizer(archive, job)
    usage, progress = Usage(), _Progress()

    def written(shard: Shard, done: int, total: int) -> None:
        progress.say(shard.file, done, total)

    export(archive, model, shards, to, tokenizer, written)
    result = {
        "checkpoint": str(archive.path),
        "to": str(to),
        "model": model.title,
        "files": sorted(path.name for path in to.iterdir()),
        "bytes": sum(shard.bytes for shard in shards),
        "seconds": round(usage.seconds, 3),
        "peak_bytes": usage.peak_bytes,
    }
    if tokenizer and rebuilt_by_transformers(model, tokenizer):
        print(
            "warning: the tokenizer is not Qwen's, but transformers 5's AutoTokenizer splits words "
            "as Qwen's does for every model of this type; load it with PreTrainedTokenizerFast",
            file=sys.stderr,
        )
    without = "" if tokenizer else "; the checkpoint has no tokenizer, so neither has the folder"
    _print_result(options.json, result, f"{archive.path} -> {options.to}", without)


def run_import(
    options: ImportOptions, job_options: Sequence[str], arguments: Sequence[str]
) -> None:
    """Import a Hugging Face model and print what was written.

    Args, Raises: as for `run_export`.
    """
    _required("import", "HF_DIR", options.folder, options.to)
    require_patched_torchtitan()
    from torchtitan_dmuon.checkpoint.hf_folder import Usage
    from torchtitan_dmuon.checkpoint.hf_import import import_model
    from torchtitan_dmuon.checkpoint.hf_model import HFModel

    job = _job(options.config, job_options)
    if job is None:
        raise ConfigError(
            "import: which model is it? add --config JOB.toml, or --model.name and --model.flavor"
        )
    model = HFModel.of(job.model.name, job.model.flavor)
    usage, progress = Usage(), _Progress()

    def written(name: str, done: int, total: int) -> None:
        progress.say(name, done, total, at_most_every=2)

    path, size = import_model(
        Path(options.folder).expanduser(), model, Path(options.to).expanduser(), written
    )
    result = {
        "checkpoint": str(path),
        "model": model.title,
        "bytes": size,
        "seconds": round(usage.seconds, 3),
        "peak_bytes": usage.peak_bytes,
    }
    start = f"; start from it: --checkpoint.enable --checkpoint.initial_load_path {path}"
    _print_result(options.json, result, f"{options.folder} -> {path}", start)


def _print_result(as_json: bool, result: dict[str, Any], what: str, more: str) -> None:
    if as_json:
        print(json.dumps(result))
        return
    print(
        f"{what}: {result['model']}, {_size(result['bytes'])} in {result['seconds']:.1f} s, "
        f"{_size(result['peak_bytes'])} of memory at most{more}"
    )
