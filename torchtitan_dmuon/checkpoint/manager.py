"""torchtitan's checkpoint manager, for jobs with and without owned matrices, and safe to kill."""

from __future__ import annotations

import os
import queue
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.distributed_c10d import _set_pg_timeout
from torchtitan.components import checkpointer as titan
from torchtitan.components.checkpointer.base import purge_thread
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.tools import filesystem

from torchtitan_dmuon.checkpoint.archive import Archive, ArchiveWriter
from torchtitan_dmuon.checkpoint.beside import Pace, Stager
from torchtitan_dmuon.checkpoint.folder import CheckpointFolder, remove
from torchtitan_dmuon.checkpoint.held import HeldTensor
from torchtitan_dmuon.checkpoint.meter import Meter
from torchtitan_dmuon.checkpoint.own_loop import set_learning_rates
from torchtitan_dmuon.checkpoint.planners import OPTIMIZER, RANDOM, SavePlanner
from torchtitan_dmuon.checkpoint.settings import facts, say_loaded
from torchtitan_dmuon.checkpoint.state import (
    ModelState,
    OptimizerState,
    RandomState,
    owner_state,
)
from torchtitan_dmuon.checkpoint.transfer import (
    explained_save,
    is_first,
    on_every_rank,
    on_first_rank,
    read,
    say_read,
    say_saved,
    write,
)
from torchtitan_dmuon.log import logger
from torchtitan_dmuon.models.fused_qkv import fused_qkv_parts
from torchtitan_dmuon.optim.container import OwnerContainer
from torchtitan_dmuon.runtime.site import sites_of


class CheckpointManager(titan.CheckpointManager):
    """Saves and loads a job's state, as torchtitan's manager does, with these differences.

    - Owned matrices and their state are written by their owners, and read by whoever owns them now.
    - A checkpoint appears under its name when it is whole. One that a killed job left unfinished is
      never loaded, and the newest complete one is found on the first rank for all.
    - Every stored item has a checksum; what is damaged, missing or another model's is one error.
    - Nothing that a checkpoint holds is run.
    - Settings of the optimizer are the running job's. Random generators are saved.
    - `async_with_pinned_mem` writes in a thread of the rank, not in a process beside it.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(titan.CheckpointManager.Config):
        initial_load_path: str | None = None
        """Checkpoint to start from where the job has none; relative to where it is started."""

        exclude_from_loading: list[str] = field(default_factory=list)
        """Parts not to load: optimizer, lr_scheduler, dataloader, train_state, rng."""

        keep_latest_k: int = 10
        """How many of the newest checkpoints are kept, at least 2; 0 keeps all."""

        def __post_init__(self) -> None:
            path = (self.initial_load_path or "").strip()
            if path and "://" not in path:
                # torchtitan wants it absolute; here it is relative to where the job is started.
                self.initial_load_path = os.path.abspath(os.path.expanduser(path))
            titan.CheckpointManager.Config.__post_init__(self)

    def __init__(
        self,
        config: Config,
        *,
        dataloader: Any,
        model_parts: list[nn.Module],
        optimizers: Any,
        lr_schedulers: Any,
        states: dict[str, Any],
        sd_adapter: Any,
        base_folder: str = "",
    ) -> None:
        # torchtitan's own constructor reads `state_dict` of the model, which owned parameters lack.
        self.enable = config.enable
        if not self.enable:
            return
        self.stager: Stager | None = None
        self.staging_future = None
        self.save_future: Future[Any] | None = None
        self.purge_thread: threading.Thread | None = None
        # Of the save that is under way.
        self._writer: ArchiveWriter | None = None
        self._pace: Pace | None = None
        self._lock: IO[str] | None = None
        self.folder = filesystem.join(base_folder, config.folder)
        self.checkpoints = CheckpointFolder(Path(self.folder))
        self.interval = config.interval
        self.load_only = config.load_only
        self.exclude_from_loading = config.exclude_from_loading
        self.initial_load_path = config.initial_load_path
        self.initial_load_model_only = config.initial_load_model_only
        self.initial_load_in_hf = config.initial_load_in_hf
        self.initial_load_in_hf_quantized = config.initial_load_in_hf_quantized
        self.enable_first_step_checkpoint = config.enable_first_step_checkpoint
        self.last_save_model_only = config.last_save_model_only
        self.last_save_in_hf = config.last_save_in_hf
        self.export_dtype = TORCH_DTYPE_MAP[config.export_dtype]
        self.sd_adapter = sd_adapter
        self.async_mode = titan.AsyncMode(config.async_mode)
        self.keep_latest_k = config.keep_latest_k
        self._facts: dict[str, Any] = {}
        self._tokenizer: Path | None = None
        self._optimizers = optimizers
        self.device = next(p.device for m in model_parts for p in m.parameters())
        self.first = is_first()
        self.states = {
            **states,
            titan.MODEL: _model_state(model_parts),
            OPTIMIZER: _optimizer_state(optimizers, model_parts),
            titan.DATALOADER: dataloader,
            titan.LR_SCHEDULER: lr_schedulers,
            RANDOM: RandomState(self.device),
        }
        self.pg = None
        if self.async_mode is not titan.AsyncMode.DISABLED and dist.is_initialized():
            self.pg = dist.new_group(backend="gloo")
        if self.first and not self.load_only:
            self._lock = self.checkpoints.lock()
            if self._lock is not None:
                self.checkpoints.recover()
            self._start_deleting()

    def _start_deleting(self) -> None:
        if self.keep_latest_k:
            self.purge_queue: queue.Queue[str | None] = queue.Queue()
            self.purge_thread = threading.Thread(
                target=purge_thread, args=(self.purge_queue, remove), daemon=True
            )
            self.purge_thread.start()

    def introduce(
        self, facts: Mapping[str, Any], *, tokenizer: Path | None, timeout: timedelta
    ) -> None:
        """Say what the job is.

        Args:
            facts: For the manifest of each checkpoint: `model`, `layout`, ...; plain JSON.
            tokenizer: Folder of the tokenizer's files, which are kept with each checkpoint.
            timeout: Limit of a step of saving that waits for other ranks.
        """
        if self.enable:
            self._facts = dict(facts)
            self._tokenizer = tokenizer
            if self.pg is not None:
                _set_pg_timeout(timeout, self.pg)

    def _close(self) -> None:
        # Not while an error is under way: what it is about may be what the save waits for.
        failing = sys.exc_info()[0] is not None
        try:
            if self.save_future is not None and not failing:
                self._wait_for_saving()
        finally:
            self._release()

    def _release(self) -> None:
        super()._close()
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.close()

    # -- save --------------------------------------------------------------------------------

    @torch.no_grad()
    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        if not self._should_save(curr_step, last_step):
            return False
        self.maybe_wait_for_saving()
        if last_step and self.last_save_in_hf:
            self._save_last_step(curr_step)
            return True
        meter = Meter(self.device)
        noted = facts(self._optimizers.optimizers, self._facts)
        writer = ArchiveWriter(self.checkpoints, curr_step, noted, self._tokenizer)
        states = self._states_to_save(curr_step, last_step)
        if last_step or self.async_mode is titan.AsyncMode.DISABLED:
            write(states, writer)
            say_saved(writer, meter)
        else:
            self._save_async(states, writer, meter)
        self._delete_old()
        return True

    def _states_to_save(self, step: int, last_step: bool) -> dict[str, Any]:
        if not last_step or not (self.last_save_model_only or step == 0):
            whole: dict[str, Any] = self._flattened_model_states_sd()
            return whole
        # The last one of a finished job, or the seed of several jobs: a model alone.
        dtype = self.export_dtype if step else None
        return {k: _cast(v, dtype) for k, v in self.states[titan.MODEL].state_dict().items()}

    def _save_async(self, states: dict[str, Any], writer: ArchiveWriter, meter: Meter) -> None:
        self._writer, self._pace = writer, Pace()
        if self.stager is None:
            pinned = self.async_mode is titan.AsyncMode.ASYNC_WITH_PINNED_MEM
            self.stager = Stager(pinned=pinned)
        future = async_save(
            states,
            storage_writer=writer,
            planner=SavePlanner(self._pace),
            process_group=self.pg,
            async_stager=self.stager,
        )
        assert isinstance(future, Future)
        self.save_future = future
        logger.info(
            "step-%d staged in %.2f s, to be written beside the training; %.1f MiB of host memory "
            "are kept for it",
            writer.step,
            meter.seconds,
            self.stager.bytes / 2**20,
        )

        def done(future: Any) -> None:
            if future.exception() is None:
                say_saved(writer, meter)

        future.add_done_callback(done)

    def _wait_for_saving(self) -> None:
        assert self._writer is not None and self._pace is not None
        self._pace.hurry()
        with explained_save(self._writer):
            super()._wait_for_saving()

    def _delete_old(self) -> None:
        if self.purge_thread is not None:
            for path in self.checkpoints.retire(self.keep_latest_k):
                self.purge_queue.put(str(path))

    # -- load --------------------------------------------------------------------------------

    @torch.no_grad()
    def _load(self, step: int = -1) -> bool:
        source = on_first_rank(f"loading from {self.folder}", lambda: self._choose(step))
        if source is None:
            logger.info("no checkpoint in %s yet: a fresh start", self.folder)
            return False
        path, model_only, from_hf = source
        meter = Meter(self.device)
        if from_hf:
            self.dcp_load(
                self._states_to_load(model_only),
                checkpoint_id=path,
                from_hf=True,
                from_quantized=self.initial_load_in_hf_quantized,
            )
            return True
        archive = on_every_rank(f"loading {path}", lambda: Archive.open(Path(path)))
        states = self._states_to_load(model_only)
        fresh = read(states, archive, self.states)
        self.states[titan.MODEL].load_state_dict(states)
        for scheduler in self.states[titan.LR_SCHEDULER].schedulers:
            set_learning_rates(scheduler)
        say_read(archive, meter, model_only=model_only)
        if not model_only:
            say_loaded(archive, fresh, self._optimizers.optimizers, self._facts)
        return True

    def _choose(self, step: int) -> tuple[str, bool, bool] | None:
        """Return path, whether the model alone is loaded, and whether it is Hugging Face's."""
        found = self.checkpoints.choose(None if step == -1 else step)
        if found is not None:
            if self.initial_load_path:
                logger.warning("initial_load_path is not used: %s has step-%d", self.folder, found)
            return str(self.checkpoints.at(found)), found == 0, False
        if self.initial_load_path:
            return self.initial_load_path, self.initial_load_model_only, self.initial_load_in_hf
        if self.initial_load_in_hf:
            return self.sd_adapter.hf_assets_path, True, True
        return None


def _model_state(model_parts: list[nn.Module]) -> Any:
    if any(sites_of(model) for model in model_parts):
        (model,) = model_parts  # several need pipeline parallelism, which owners refuse
        return ModelState(model, fused_qkv_parts(model))
    return titan.ModelWrapper(model_parts)


def _optimizer_state(optimizers: Any, model_parts: list[nn.Module]) -> OptimizerState:
    parts = {k: v for model in model_parts for k, v in fused_qkv_parts(model).items()}
    if isinstance(optimizers, OwnerContainer):

        def read() -> dict[str, Any]:
            return {k: v for o in optimizers.optimizers for k, v in owner_state(o, parts).items()}

        return OptimizerState(read)
    return OptimizerState(optimizers.state_dict, parts)


def _cast(value: Any, dtype: torch.dtype | None) -> Any:
    is_float = isinstance(value, torch.Tensor | HeldTensor) and value.dtype.is_floating_point
    return value.to(dtype) if is_float and dtype is not None else value
