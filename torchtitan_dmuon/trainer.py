"""torchtitan's trainer, with the little that it has no hook for."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torchtitan import trainer as titan
from torchtitan.components.dataloader import DataloaderExhaustedError
from torchtitan.tools.utils import device_type

from torchtitan_dmuon.checkpoint.manager import CheckpointManager
from torchtitan_dmuon.log import logger
from torchtitan_dmuon.memory import POOL_FILE
from torchtitan_dmuon.metrics import ProgressMetrics
from torchtitan_dmuon.optim.container import OwnerContainer
from torchtitan_dmuon.runtime.replicas import check_replicas

Batch = tuple[dict[str, torch.Tensor], torch.Tensor]


def _writes() -> bool:
    """Whether this rank writes what is written once for the job."""
    return not dist.is_initialized() or dist.get_rank() == 0


class Trainer(titan.Trainer):
    """torchtitan's trainer, which also says what will run, how long, and where the data ended."""

    @dataclass(kw_only=True, slots=True)
    class Config(titan.Trainer.Config):
        pass

    def __init__(self, config: Config) -> None:
        self.data_ended = False
        super().__init__(config)
        if isinstance(self.metrics_processor, ProgressMetrics):
            self.metrics_processor.total_steps = config.training.steps
        logger.info(self.describe())
        if isinstance(self.checkpointer, CheckpointManager):
            self._introduce(self.checkpointer)
        routes = Path(self.config.dump_folder, "routing.txt")
        self._pool_told = False
        if _writes():
            Path(self.config.dump_folder, POOL_FILE).unlink(missing_ok=True)  # of an earlier job
        if isinstance(self.optimizers, OwnerContainer):
            self._say_routes(self.optimizers, routes)
        elif _writes():
            routes.unlink(missing_ok=True)  # of an earlier job with owners

    def _introduce(self, checkpointer: CheckpointManager) -> None:
        """Tell the checkpoint manager what its checkpoints are of."""
        spec, dims = self.config.model_spec, self.parallel_dims
        assert spec is not None
        schedule = self.config.lr_scheduler
        folder = getattr(self.tokenizer, "tokenizer_path", None)
        checkpointer.introduce(
            {
                "model": {
                    "name": spec.name,
                    "flavor": spec.flavor,
                    "vocab_size": spec.model.vocab_size,
                },
                "job": {
                    "layout": f"{getattr(self.config.parallelism, 'mode', 'fsdp')} on "
                    f"{dims.dp_replicate} x {dims.dp_shard} ranks",
                    "tokens a step": self._sequences() * self.config.training.seq_len,
                    "seq_len": self.config.training.seq_len,
                    "warmup_steps": schedule.warmup_steps,
                    "total_steps": schedule.total_steps or self.config.training.steps,
                    "decay_ratio": schedule.decay_ratio,
                    "decay_type": schedule.decay_type,
                    "min_lr_factor": schedule.min_lr_factor,
                },
            },
            tokenizer=Path(folder) if folder else None,
            timeout=timedelta(seconds=self.config.comm.train_timeout_seconds),
        )

    def _say_routes(self, optimizers: OwnerContainer, path: Path) -> None:
        """Log once where parameters go; the full list, one line each, is written to a file."""
        if _writes():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("\n\n".join(map(str, optimizers.routes)) + "\n")
        logger.info("routes (each parameter: %s)\n%s", path, optimizers.describe())

    def train_step(self, data_iterator: Iterator[Batch]) -> None:
        """Take one step; compare the replicas after it if it is time to."""
        super().train_step(data_iterator)
        self._tell_pool()
        interval = getattr(self.config.parallelism, "replica_check_interval", 0)
        if interval and self.step % interval == 0:
            for model in self.model_parts:
                check_replicas(model)

    def _tell_pool(self) -> None:
        """Write what the pool takes to a file, once it is open: `dmuon doctor --job` reads it."""
        if self._pool_told or not _writes() or not isinstance(self.optimizers, OwnerContainer):
            return
        parts = self.optimizers.pool_bytes()
        if parts:
            path = Path(self.config.dump_folder, POOL_FILE)
            path.write_text(json.dumps({"bytes": parts}, indent=1) + "\n")
            self._pool_told = True

    def batch_generator(self, data_iterable: Iterable[Batch]) -> Iterator[Batch]:
        """Yield batches; note when the data end, and that the step under way does not count."""
        try:
            yield from super().batch_generator(data_iterable)
        except DataloaderExhaustedError:
            self.data_ended = True
            self.step -= 1
            raise

    def train(self) -> None:
        """Train to the last step, or to the end of the data: then the last state is saved too."""
        super().train()
        if not self.data_ended:
            return
        logger.warning("the data ended after %d of %d steps", self.step, self.config.training.steps)
        if self.step % self.config.checkpoint.interval:
            self.checkpointer.save(self.step, last_step=True)

    def _sequences(self) -> int:
        """Sequences of one step on all ranks."""
        dims = self.parallel_dims
        ranks = dims.dp_replicate * dims.dp_shard
        steps = self.gradient_accumulation_steps
        return int(self.config.training.local_batch_size * ranks * steps)

    def describe(self) -> str:
        """One line: model, parameters, layout, batch."""
        dims, training, spec = self.parallel_dims, self.config.training, self.config.model_spec
        assert spec is not None
        parameters = sum(p.numel() for m in self.model_parts for p in m.parameters())
        others = {"context": dims.cp, "tensor": dims.tp, "pipeline": dims.pp, "expert": dims.ep}
        more = "".join(f", {name} {degree}" for name, degree in others.items() if degree > 1)
        return (
            f"{spec.name} {spec.flavor}: {parameters:,} parameters, "
            f"{getattr(self.config.parallelism, 'mode', 'fsdp')} on {dims.dp_replicate} x "
            f"{dims.dp_shard} {device_type} ranks (replicate x shard{more}), "
            f"{self._sequences()} x {training.seq_len} tokens a step"
        )
