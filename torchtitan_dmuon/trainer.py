"""torchtitan's trainer, with the little that it has no hook for."""

from __future__ import annotations

from dataclasses import dataclass

from torchtitan import trainer as titan
from torchtitan.tools.utils import device_type

from torchtitan_dmuon.log import logger
from torchtitan_dmuon.metrics import ProgressMetrics


class Trainer(titan.Trainer):
    """Tells the progress line how long the job is, and says in one line what will run."""

    @dataclass(kw_only=True, slots=True)
    class Config(titan.Trainer.Config):
        pass

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        if isinstance(self.metrics_processor, ProgressMetrics):
            self.metrics_processor.total_steps = config.training.steps
        logger.info(self.describe())

    def describe(self) -> str:
        """One line: model, parameters, layout, batch."""
        dims, training, spec = self.parallel_dims, self.config.training, self.config.model_spec
        assert spec is not None
        parameters = sum(p.numel() for m in self.model_parts for p in m.parameters())
        sequences = (
            training.local_batch_size
            * dims.dp_replicate
            * dims.dp_shard
            * self.gradient_accumulation_steps
        )
        others = {"context": dims.cp, "tensor": dims.tp, "pipeline": dims.pp, "expert": dims.ep}
        more = "".join(f", {name} {degree}" for name, degree in others.items() if degree > 1)
        return (
            f"{spec.name} {spec.flavor}: {parameters:,} parameters, "
            f"{getattr(self.config.parallelism, 'mode', 'fsdp')} on {dims.dp_replicate} x "
            f"{dims.dp_shard} {device_type} ranks (replicate x shard{more}), "
            f"{sequences} x {training.seq_len} tokens a step"
        )
