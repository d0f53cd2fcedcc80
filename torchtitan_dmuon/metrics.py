"""Progress lines for people, and the same numbers for TensorBoard."""

from __future__ import annotations

import math
import sys
import time
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.tools import utils

from torchtitan_dmuon.log import logger


def format_duration(seconds: float) -> str:
    """Return seconds as `45s`, `12m05s` or `3h07m`."""
    total = max(0, round(seconds))
    hours, minutes = total // 3600, total // 60 % 60
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{total % 60:02d}s" if minutes else f"{total}s"


@runtime_checkable
class ReportsSteps(Protocol):
    """Optimizers that say what their steps did."""

    def step_metrics(self) -> dict[str, float]:
        """Return curves for the steps since the last call. Collective."""
        ...


class ProgressMetrics(MetricsProcessor):
    """torchtitan's metrics with a progress line that has learning rate and time left.

    Attributes:
        total_steps: Steps of the whole job; set by the trainer, needed for the time left.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        pass

    def __init__(self, config: Config, **kwargs: Any) -> None:
        super().__init__(config, **kwargs)
        self.time_last_log: float
        self.total_steps: int | None = None
        self._last_step: int | None = None
        # Exponential mean of the seconds of a step; the first step (lazy set-up) is left out.
        self._step_seconds: float | None = None
        if config.disable_color_printing or not sys.stdout.isatty():
            self.color = utils.NoColor()

    def should_log(self, step: int) -> bool:
        """Log the first step, every `log_freq`-th, and the last."""
        return bool(super().should_log(step)) or step == self.total_steps

    def log(
        self,
        step: int,
        global_avg_loss: float,
        global_max_loss: float,
        grad_norm: float,
        extra_metrics: dict[str, Any] | None = None,
    ) -> None:
        """Write one line to the console and one point to each TensorBoard curve.

        Args:
            step: The step just finished, counted from 1.
            global_avg_loss: Loss per token over all ranks.
            global_max_loss: Largest loss per token of one rank.
            grad_norm: Global gradient norm before clipping.
            extra_metrics: Further curves; keys that start with `lr/` show in the line.
        """
        elapsed = time.perf_counter() - self.time_last_log
        first = self._last_step is None
        steps = 1 if self._last_step is None else step - self._last_step
        self._last_step = step
        seconds = elapsed / max(1, steps)
        if not first:
            old = self._step_seconds
            self._step_seconds = seconds if old is None else 0.7 * old + 0.3 * seconds
        metrics = self._collect(elapsed, seconds)
        metrics["loss_metrics/global_avg_loss"] = global_avg_loss
        metrics["loss_metrics/global_max_loss"] = global_max_loss
        metrics["grad_norm"] = grad_norm
        if isinstance(self.optimizers, ReportsSteps):
            metrics |= self.optimizers.step_metrics()
        metrics |= self._load_balancing()
        extra = extra_metrics or {}
        self.logger.log({**metrics, **extra}, step)
        logger.info(self._line(step, global_avg_loss, grad_norm, metrics, extra))
        self.ntokens_since_last_log = 0
        self.data_loading_times.clear()
        self.time_last_log = time.perf_counter()
        self.device_memory_monitor.reset_peak_stats()

    def _load_balancing(self) -> dict[str, float]:
        """Experts' load-balancing loss of the last micro-batch, mean of all ranks. Collective."""
        values = [getattr(model, "load_balancing", None) for model in self.model_parts or ()]
        losses = [value.detach().clone() for value in values if isinstance(value, torch.Tensor)]
        if not losses:
            return {}
        mean = torch.stack(losses).sum()
        if dist.is_initialized():
            dist.all_reduce(mean)
            mean /= dist.get_world_size()
        return {"loss_metrics/load_balancing": mean.item()}

    def _collect(self, elapsed: float, seconds: float) -> dict[str, float]:
        """Throughput, time and memory of the steps since the last line."""
        tps = self.ntokens_since_last_log / (elapsed * self.parallel_dims.non_data_parallel_size)
        memory = self.device_memory_monitor.get_peak_stats()
        loading = sum(self.data_loading_times)
        metrics = {
            "throughput(tps)": tps,
            "tflops": self.num_flops_per_token * tps / 1e12,
            "time_metrics/end_to_end(s)": seconds,
            "time_metrics/data_loading(s)": loading / max(1, len(self.data_loading_times)),
            "time_metrics/data_loading(%)": 100 * loading / elapsed,
            "memory/max_active(GiB)": memory.max_active_gib,
            "memory/max_active(%)": memory.max_active_pct,
            "memory/max_reserved(GiB)": memory.max_reserved_gib,
            "memory/max_reserved(%)": memory.max_reserved_pct,
            "memory/num_alloc_retries": memory.num_alloc_retries,
            "memory/num_ooms": memory.num_ooms,
        }
        # MFU compares with the BF16 peak: it means nothing with quantization or on a CPU.
        if not self.has_quantization and math.isfinite(self.gpu_peak_flops):
            metrics["mfu(%)"] = 100 * self.num_flops_per_token * tps / self.gpu_peak_flops
        return metrics

    def _line(
        self,
        step: int,
        loss: float,
        grad_norm: float,
        metrics: dict[str, float],
        extra: dict[str, Any],
    ) -> str:
        c = self.color
        # Rates that differ (one per parameter group) are all shown.
        rates = dict.fromkeys(f"{v:.3g}" for k, v in extra.items() if k.startswith("lr/"))
        matrices = metrics.get("optimizer/matrices_per_step", 0)
        skipped = metrics.get("optimizer/skipped_steps", 0)
        balance = metrics.get("loss_metrics/load_balancing")
        left = ""
        if self.total_steps is not None and self._step_seconds is not None:
            left = format_duration((self.total_steps - step) * self._step_seconds)
        fields = [
            (c.red, "step", f"{step:2d}"),
            (c.green, "loss", f"{loss:8.5f}"),
            (c.green, "balance", "" if balance is None else f"{balance:.3f}"),
            (c.orange, "grad_norm", f"{grad_norm:7.4f}"),
            (c.magenta, "lr", ",".join(rates)),
            (c.blue, "tps", f"{round(metrics['throughput(tps)']):,}"),
            (
                c.turquoise,
                "memory",
                f"{metrics['memory/max_reserved(GiB)']:.2f}GiB"
                f"({metrics['memory/max_reserved(%)']:.1f}%)",
            ),
            (c.cyan, "mfu", f"{metrics['mfu(%)']:.1f}%" if "mfu(%)" in metrics else ""),
            (c.blue, "matrices", f"{matrices:.0f}" if matrices else ""),
            (c.red, "skipped", f"{skipped:.0f}" if skipped else ""),
            (c.yellow, "left", left),
        ]
        text = "  ".join(f"{color}{name}: {v}" for color, name, v in fields if v)
        return f"{text}{c.reset}"
