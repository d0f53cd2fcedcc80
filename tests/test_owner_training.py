"""Modes owner and gather end to end: the trainer, its models and its options on gloo ranks."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.worlds import RankFailed, run_world
from torchtitan_dmuon.doctor import read_pool
from torchtitan_dmuon.runtime.site import canonical_name

pytestmark = pytest.mark.slow

LAYOUTS = ["ddp", "fsdp_z2", "fsdp_z3", "hsdp_z2", "hsdp_z3"]
SMALL = ["--training.seq_len", "32", "--training.local_batch_size", "2", "--metrics.log_freq", "1"]
SMALL += ["--optimizer.ns_dtype", "float32", "--parallelism.owner_cost", "model"]
SMALL += ["--training.steps", "4", "--lr_scheduler.warmup_steps", "2"]


def build_trainer(arguments: list[str]) -> Any:
    """Build the trainer of a job on this rank, the way train.py does."""
    from torchtitan.tools.utils import device_type

    from torchtitan_dmuon.config.build import build
    from torchtitan_dmuon.config.checks import check
    from torchtitan_dmuon.config.manager import load_job
    from torchtitan_dmuon.log import init_console

    init_console(int(os.environ["RANK"]))
    job = load_job(arguments)
    check(job, int(os.environ["WORLD_SIZE"]), device_type)
    return build(job, device_type).build()


def losses_and_curves(arguments: list[str]) -> tuple[list[float], list[dict[str, float]]]:
    """Train; return the loss and the curves of each step."""
    trainer = build_trainer(arguments)
    losses: list[float] = []
    curves: list[dict[str, float]] = []
    log, write = trainer.metrics_processor.log, trainer.metrics_processor.logger.log

    def record(step: int, loss: float, *args: Any, **kwargs: Any) -> None:
        losses.append(loss)
        log(step, loss, *args, **kwargs)

    def record_curves(metrics: dict[str, float], step: int) -> None:
        curves.append(metrics)
        write(metrics, step)

    trainer.metrics_processor.log = record
    trainer.metrics_processor.logger.log = record_curves
    trainer.train()
    trainer.close()
    return losses, curves


def _train(size: int, job: list[str], dump: Path) -> tuple[list[float], list[dict[str, float]]]:
    arguments = [*SMALL, "--dump_folder", str(dump), *job]
    results = run_world(size, losses_and_curves, arguments, timeout_seconds=120)
    return results[0]  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses of the debug job on one rank, with the batch of four."""
    job = ["--config", "debug_owner.toml", "--training.global_batch_size", "8"]
    return _train(1, job, tmp_path_factory.mktemp("reference"))[0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_one_algorithm(layout: str, reference: list[float], tmp_path: Path) -> None:
    """DDP, FSDP and HSDP on four ranks give the losses of one rank, from the same weights; each
    matrix is orthogonalized once per step in the whole world, and the routes are written down."""
    losses, curves = _train(4, ["--config", f"debug_owner_{layout}.toml"], tmp_path)
    assert losses == pytest.approx(reference, rel=1e-4)
    assert losses[-1] < losses[0] - 0.1
    assert [c["optimizer/matrices_per_step"] for c in curves] == [28] * 4
    assert all(c["optimizer/skipped_steps"] == 0 for c in curves)
    for phase in ("reduce", "orthogonalize", "elementwise", "publish"):
        assert all(c[f"optimizer/{phase}(s)"] >= 0 for c in curves)
    text = (tmp_path / "routing.txt").read_text()
    assert re.search(r"layers\.3\.feed_forward\.w2\.weight +128x352 +matrix +\d", text)
    assert re.search(r"lm_head\.weight +2048x128 +adamw +sharded", text) and "28 matrices" in text


@pytest.mark.parametrize(
    ("layout", "count"),
    [
        pytest.param("fsdp_z3", 4 * 28, marks=pytest.mark.long),
        ("hsdp_z2", 4 * 28),
    ],
)
def test_gathered_matrices_train_alike(
    layout: str, count: int, reference: list[float], tmp_path: Path
) -> None:
    """Line B is the same algorithm, with every matrix orthogonalized on every rank."""
    job = ["--config", f"debug_owner_{layout}.toml", "--line", "B"]
    losses, curves = _train(4, job, tmp_path)
    assert losses == pytest.approx(reference, rel=1e-4)
    assert curves[0]["optimizer/matrices_per_step"] == count


@pytest.mark.parametrize(
    "layout", [*(pytest.param(x, marks=pytest.mark.long) for x in LAYOUTS[:-1]), LAYOUTS[-1]]
)
def test_line_d_trains_alike(layout: str, reference: list[float], tmp_path: Path) -> None:
    """Over the operators: the losses of one rank; once the pool is open every gradient is born in
    it, and `dmuon doctor` can tell what it takes."""
    job = ["--config", f"debug_owner_{layout}.toml", "--line", "D", "--training.steps", "5"]
    losses, curves = _train(4, job, tmp_path)
    assert losses[:4] == pytest.approx(reference, rel=1e-4)
    assert [c["pool/gradient_hit_rate"] for c in curves[3:]] == [1.0, 1.0]
    parts = read_pool(tmp_path)
    assert parts["gradients"] > 0 and parts["control"] > 0
    # One row, which is a node, publishes to nobody, and no chain of nodes needs rings.
    several = not layout.startswith("fsdp")
    assert (parts["copies"] > 0) == several
    assert (parts["rings"] > 0) == several


def test_the_outside_peer_trains(tmp_path: Path) -> None:
    """torch.optim.Muon on FSDP2 starts from the same weights and comes close: its Newton-Schulz is
    in bfloat16."""
    # Few steps: most CPUs take long over bfloat16.
    short = ["--training.steps", "2", "--optimizer.ns_steps", "2"]
    job = ["--config", "debug_owner_fsdp_z3.toml", "--line", "torch", *short]
    ours = ["--config", "debug_owner_fsdp_z3.toml", "--optimizer.ns_dtype", "bfloat16", *short]
    losses, own = _train(4, job, tmp_path / "a")[0], _train(4, ours, tmp_path / "b")[0]
    assert losses[0] == pytest.approx(own[0], rel=1e-6)
    assert losses == pytest.approx(own, rel=5e-3)


@pytest.mark.parametrize(
    "options",
    [
        ["--activation_checkpoint.mode", "full"],
        ["--training.global_batch_size", "8", "--training.local_batch_size", "1"],
        ["--loss.name", "chunked_cross_entropy"],
        # The runtime's own tests hold these to the same bits; here the trainer's part of them.
        *(
            pytest.param(options, marks=pytest.mark.long)
            for options in (
                ["--activation_checkpoint.mode", "selective"],
                ["--compile.enable", "--compile.components", "model"]
                + ["--compile.backend", "aot_eager"],
                ["--optimizer.publish", "sync"],
                ["--parallelism.prefetch_depth", "0"],
                ["--parallelism.owner_assignment", "round_robin"],
                ["--validator.enable", "--validator.freq", "2", "--validator.steps", "1"]
                + ["--validator.data.dataset", "python_stdlib"],
            )
        ),
    ],
    ids=lambda o: " ".join(o[:2]),
)
def test_options_do_not_change_the_run(
    options: list[str], reference: list[float], tmp_path: Path
) -> None:
    """Recomputation, compiled blocks, accumulation, publishing, prefetching, owners and validation
    change time and memory only."""
    losses = _train(4, ["--config", "debug_owner_hsdp_z3.toml", *options], tmp_path)[0]
    assert losses == pytest.approx(reference, rel=1e-4)


@pytest.mark.parametrize(
    ("model", "flavor", "matrices"),
    # llama3: 6 layers with Q, K and V fused in one weight; qwen3: fused too, with QK norms.
    [
        ("llama3", "debugmodel", 6 * 7),
        pytest.param("qwen3", "debugmodel", 8 * 7, marks=pytest.mark.long),
    ],
)
def test_torchtitans_decoders_train(model: str, flavor: str, matrices: int, tmp_path: Path) -> None:
    """torchtitan's own models: fused projections are three matrices each."""
    job = ["--config", "debug_owner_hsdp_z3.toml", "--model.name", model, "--model.flavor", flavor]
    losses, curves = _train(4, job, tmp_path)
    assert curves[0]["optimizer/matrices_per_step"] == matrices
    assert losses[-1] < losses[0]


def initial_weights(arguments: list[str]) -> dict[str, np.ndarray]:
    """Return a job's full weights at step 0."""
    from torch.distributed.tensor import DTensor

    from torchtitan_dmuon import full_params

    trainer = build_trainer(arguments)
    (model,) = trainer.model_parts

    def read() -> dict[str, np.ndarray]:
        full = {
            name: p.full_tensor() if isinstance(p, DTensor) else p
            for name, p in model.named_parameters()
        }
        return {name: p.detach().clone().numpy() for name, p in full.items()}

    if trainer.config.parallelism.mode == "fsdp":
        result = read()
    else:
        with full_params(model):
            result = read()
    trainer.close()
    return result


@pytest.mark.parametrize(
    "model", [("qwen2_5", "debug"), pytest.param(("llama3", "debugmodel"), marks=pytest.mark.long)]
)
def test_weights_at_step_0_do_not_depend_on_the_mode(
    model: tuple[str, str], tmp_path: Path
) -> None:
    """Owners start from bit for bit what FSDP starts from."""
    common = [*SMALL, "--dump_folder", str(tmp_path), "--config", "debug_owner_hsdp_z3.toml"]
    common += ["--model.name", model[0], "--model.flavor", model[1]]
    fsdp, owner = (
        run_world(4, initial_weights, [*common, "--line", line], timeout_seconds=120)[0]
        for line in ("A", "C")
    )
    assert fsdp.keys() == owner.keys()
    for name, value in fsdp.items():
        np.testing.assert_array_equal(value, owner[name], err_msg=name, strict=True)


def rates(arguments: list[str]) -> list[dict[str, Any]]:
    """Return the groups of the optimizer at step 0, and their rates at each of 4 steps."""
    trainer = build_trainer(arguments)
    (optimizer,) = trainer.optimizers
    groups = [
        {k: v for k, v in g.items() if k != "params"} | {"curve": []}
        for g in optimizer.param_groups
    ]
    for _ in range(4):
        for group, live in zip(groups, optimizer.param_groups, strict=True):
            group["curve"].append(live["lr"])
        trainer.lr_schedulers.step()
    parameters = trainer.model_parts[0].named_parameters()
    trainable = {canonical_name(n) for n, p in parameters if p.requires_grad}
    names = [name for group in groups for name in group["param_names"]]
    assert sorted(names) == sorted(trainable)
    trainer.close()
    return groups


def test_groups_are_the_files(tmp_path: Path) -> None:
    """Each route has the file's values, an entry of param_groups overrides them by canonical name,
    and a schedule keeps the ratio of the rates (here inside checkpoint wrappers)."""
    job = tmp_path / "job.toml"
    job.write_text(
        'base = "debug_owner_hsdp_z2.toml"\n[optimizer]\nlr = 0.02\nadamw_betas = [0.9, 0.98]\n'
        "adamw_lr = 3e-4\nadamw_weight_decay = 0.0\n[activation_checkpoint]\nmode = 'full'\n"
        "[[optimizer.param_groups]]\npattern = '^layers\\.0\\.attention\\.wo\\.weight$'\n"
        "optimizer_name = 'DMuon'\noptimizer_kwargs = { lr = 0.01, ns_steps = 3 }\n"
    )
    arguments = [*SMALL[:-2], "--lr_scheduler.warmup_steps", "2", "--dump_folder", str(tmp_path)]
    groups = run_world(4, rates, [*arguments, "--config", str(job)], timeout_seconds=120)[0]
    wo, matrices, rest = groups
    assert wo["param_names"] == ["layers.0.attention.wo.weight"]
    assert (wo["ns_steps"], matrices["ns_steps"]) == (3, 5)
    assert (wo["initial_lr"], matrices["initial_lr"], rest["initial_lr"]) == (0.01, 0.02, 3e-4)
    assert (matrices["weight_decay"], rest["weight_decay"]) == (0.1, 0.0)
    assert rest["betas"] == (0.9, 0.98)
    for group in groups:
        ratio = [a / b for a, b in zip(group["curve"], matrices["curve"], strict=True)]
        assert ratio == pytest.approx([group["initial_lr"] / 0.02] * 4)
    assert matrices["curve"][0] == pytest.approx(0.01)  # half-way up


def test_a_pattern_that_matches_nothing_is_an_error(tmp_path: Path) -> None:
    """It is named, on every rank."""
    job = tmp_path / "job.toml"
    job.write_text(
        'base = "debug_owner_fsdp_z2.toml"\n[[optimizer.param_groups]]\npattern = "atention"\n'
        'optimizer_name = "DMuon"\n'
    )
    arguments = [*SMALL, "--dump_folder", str(tmp_path), "--config", str(job)]
    with pytest.raises(RankFailed, match="pattern 'atention' matches no trainable parameter"):
        run_world(4, losses_and_curves, arguments, timeout_seconds=120)


def drift(arguments: list[str]) -> None:
    """Change one weight of one row after the first step, and go on."""
    trainer = build_trainer(arguments)
    step = trainer.optimizers.step
    (model,) = trainer.model_parts

    def step_and_drift() -> None:
        step()
        if trainer.step == 2 and trainer.parallel_dims.get_mesh("dp_replicate").get_local_rank():
            with torch.no_grad():
                model.norm.weight.to_local()[0] += 1e-3

    trainer.optimizers.step = step_and_drift
    trainer.train()


def test_replicas_that_drift_apart_stop_the_job(tmp_path: Path) -> None:
    """The check at the next interval names the parameter."""
    job = [*SMALL, "--dump_folder", str(tmp_path), "--config", "debug_owner_hsdp_z2.toml"]
    job += ["--parallelism.replica_check_interval", "3"]
    with pytest.raises(RankFailed, match=r"replicas have drifted apart: norm\.weight"):
        run_world(4, drift, job, timeout_seconds=120)


def bad_step(arguments: list[str]) -> list[dict[str, float]]:
    """Put an infinity into one rank's gradients in step 2; return the curves of all steps."""
    trainer = build_trainer(arguments)
    curves: list[dict[str, float]] = []
    trainer.metrics_processor.logger.log = lambda metrics, step: curves.append(metrics)

    clip = trainer.optimizers.clip_grad_norm_

    def clip_spoiled(*args: Any, **kwargs: Any) -> torch.Tensor:
        if trainer.step == 2 and os.environ["RANK"] == "3":
            for group in trainer.optimizers.optimizers[0].runtime.groups:
                for gradient in list(group.gradients.values())[:1]:
                    gradient[0] = float("inf")
        return clip(*args, **kwargs)

    trainer.optimizers.clip_grad_norm_ = clip_spoiled
    trainer.train()
    trainer.close()
    return curves


def test_a_skipped_step_is_counted(tmp_path: Path) -> None:
    """A step with a non-finite gradient is skipped by all ranks, and the curves say so."""
    job = [*SMALL, "--dump_folder", str(tmp_path), "--config", "debug_owner_hsdp_z3.toml"]
    curves = run_world(4, bad_step, job, timeout_seconds=120)[0]
    assert [c["optimizer/skipped_steps"] for c in curves] == [0, 1, 0, 0]
    assert [c["optimizer/matrices_per_step"] for c in curves] == [28, 0, 28, 28]
