"""Qwen1.5-MoE on owners: each expert is a matrix of its own, on the storage of the 3-D tensor."""

from __future__ import annotations

from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from tests.runtime import reference
from tests.runtime.harness import Case, Outcome, dedicate, make_mesh, open_world, run_case
from tests.runtime.models import FIXTURES, Fixture
from tests.runtime.reference import Trace, distance
from tests.test_owner_training import SMALL, losses_and_curves
from tests.worlds import pack, run_world, unpack
from torchtitan_dmuon.models.qwen_moe import QwenMoESize, qwen_moe_config

# Relative, Frobenius, as for every other model.
TOLERANCE = 1e-4
# Of two parameters the gradient is largely rounding, which their update makes as large as the rest:
# probabilities add up to one, so the router's lacks a rank, and a key's bias shifts all logits of a
# query nearly alike.
ROUNDED = {"router.gate.weight": 5e-3, "wk.bias": 5e-3}
SEQUENCES, LENGTH, VOCABULARY, RARE = 24, 12, 97, 40
SOME_RANKS, NO_RANK = 4, 5
"""Experts that get tokens from the first sequences only, and none at all."""

SIZE = QwenMoESize(
    dim=32,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    expert_hidden_dim=16,
    shared_hidden_dim=40,
    n_experts=6,
    top_k=2,
    vocab_size=VOCABULARY,
    max_seq_len=LENGTH,
    aux_loss_coef=0.05,
)


def build() -> Any:
    """Return a model whose tokens from RARE on go to SOME_RANKS, and none to NO_RANK."""
    torch.manual_seed(0)
    model: Any = qwen_moe_config(SIZE, attn_backend="sdpa").build()
    model.init_states()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
            elif "norm" in name:
                parameter.fill_(1.0)
        # Two features that only the router and, by the residuals, nothing else depends on much.
        embedding = model.tok_embeddings.weight
        embedding.normal_()
        embedding[:, 0] = 6.0
        embedding[:, 1] = 0.0
        embedding[RARE:, 1] = 12.0
        for layer in model.layers.values():
            router = layer.moe.router.gate.weight
            router[:, :2] = 0
            router[SOME_RANKS, :2] = torch.tensor([-2.0, 4.0])
            router[NO_RANK, :2] = torch.tensor([-3.0, 0.0])
    return model


def loss(model: Any, step: int, part: int, parts: int, micro_batches: int) -> torch.Tensor:
    """Cross-entropy of a permutation of each token; the first quarter has the rare tokens."""
    generator = torch.Generator().manual_seed(300 + step)
    tokens = torch.randint(0, RARE, (SEQUENCES, LENGTH), generator=generator)
    first = SEQUENCES // 4
    tokens[:first] = torch.randint(RARE, VOCABULARY, (first, LENGTH), generator=generator)
    tokens = tokens[part * SEQUENCES // parts : (part + 1) * SEQUENCES // parts]
    positions = torch.arange(LENGTH).expand(len(tokens), -1)
    # Gradients are averaged over ranks, and summed over micro-batches.
    model.config.aux_loss_share = 1 / micro_batches
    logits = model(tokens, positions, model.get_attention_masks(positions))
    return (
        F.cross_entropy(logits.flatten(0, 1), (tokens * 7 % VOCABULARY).flatten()) / micro_batches
    )


def _rows(model: nn.Module) -> dict[str, Any]:
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.ndim == 3:
            experts, rows, _ = parameter.shape
            found[name] = tuple(tuple(range(e * rows, (e + 1) * rows)) for e in range(experts))
    return found


FIXTURES["qwen_moe"] = Fixture(build, loss, _rows(build()))  # type: ignore[index]


def _case(mesh: tuple[int, int], zero: int, mode: str, **more: Any) -> Case:
    name = f"{mesh[0]}x{mesh[1]}-zero{zero}-{mode}" + "".join(f"-{k}" for k in more)
    return Case(
        name, "qwen_moe", mesh, dedicate={"reshard_after_forward": zero == 3, "mode": mode}, **more
    )


CASES = [
    _case((1, 1), 3, "owner"),
    _case((4, 1), 3, "owner", clip=0.3),
    _case((1, 4), 2, "owner"),
    _case((1, 4), 3, "owner", accumulate=3, defer=True),
    _case((2, 2), 3, "owner", accumulate=3, clip=0.3),
    _case((1, 4), 3, "gather"),
    _case((2, 2), 2, "gather", accumulate=3),
]


def _run(cases: list[Case]) -> bytes:
    if cases[0].size > 1:
        open_world()
    return pack([run_case(case) for case in cases])


@cache
def _outcomes(size: int) -> dict[str, list[Outcome]]:
    cases = [case for case in CASES if case.size == size]
    ranks = [unpack(data) for data in run_world(size, _run, cases, timeout_seconds=120)]
    return {case.name: [rank[i] for rank in ranks] for i, case in enumerate(cases)}


def _matrix_names(model: nn.Module) -> list[str]:
    return [n for n, p in model.named_parameters() if p.ndim >= 2 and n.startswith("layers.")]


@cache
def _reference(ranks: int, micro_batches: int, clip: float | None) -> Trace:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "matrix_names", _matrix_names)
        return reference.train(
            FIXTURES["qwen_moe"], ranks=ranks, micro_batches=micro_batches, clip=clip
        )


def test_the_data_leave_experts_without_tokens() -> None:
    """The premise: with four ranks one expert has tokens on one rank alone, one on none."""
    model, routed = build(), []
    for layer in model.layers.values():
        layer.moe.router.register_forward_hook(lambda _, __, out: routed.append(out[1]))
    for part in range(4):
        loss(model, 0, part, 4, 1)
    for i, chosen in enumerate(routed):
        counts = torch.bincount(chosen.flatten(), minlength=SIZE.n_experts)
        assert (counts[SOME_RANKS] > 0) == (i // SIZE.n_layers == 0), f"call {i}: {counts}"
        assert not counts[NO_RANK] and (counts[:SOME_RANKS] > 0).any()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_training_is_that_of_one_process(case: Case) -> None:
    """Every parameter's update, each expert orthogonalised for itself, in every layout; an expert
    without tokens on some ranks has the others' gradient, one without any has zero."""
    expected = _reference(case.size, case.accumulate, case.clip)
    results = _outcomes(case.size)[case.name]
    assert expected.weights[0].keys() == results[0].weights[0].keys()
    for name, weight in expected.weights[0].items():
        bound = next((b for end, b in ROUNDED.items() if name.endswith(end)), TOLERANCE)
        torch.testing.assert_close(results[0].weights[0][name], weight, rtol=0, atol=0)
        for step in range(case.steps):
            update, exact = results[0].update(step, name), expected.update(step, name)
            pairs = zip(update, exact, strict=True) if update.ndim == 3 else [(update, exact)]
            for e, (one, other) in enumerate(pairs):
                off = distance(one, other)
                assert off <= bound, f"step {step}: {name}[{e}] is off by {off:.1e}"
    for r in results:
        assert r.losses == pytest.approx(expected.losses, rel=TOLERANCE)
    w1 = "layers.0.moe.routed_experts.inner_experts.w1_EFD"
    idle = results[0].update(0, w1)[NO_RANK]
    torch.testing.assert_close(idle, -0.02 * 0.1 * expected.weights[0][w1][NO_RANK].double())
    assert case.clip is None or min(expected.norms) > case.clip, "the case does not clip"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_each_expert_is_orthogonalised_once_per_step(case: Case) -> None:
    """Once in the world with owners, once per rank in the baseline."""
    results = _outcomes(case.size)[case.name]
    matrices = SIZE.n_layers * (3 * SIZE.n_experts + 4 + 3 + 1 + 1)
    for step in range(case.steps):
        counts = [r.orthogonalized[step] for r in results]
        if case.dedicate["mode"] == "owner":
            assert sum(counts) == matrices
        else:
            assert counts == [matrices] * case.size


# -- storage (paper C.5) -----------------------------------------------------------------------


class _Copies(TorchDispatchMode):
    """Counts what makes a copy of a whole tensor with three dimensions or of a dense weight."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[tuple[int, ...]] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        out = function(*args, **(kwargs or {}))
        name = function._schema.name
        if name in ("aten::copy_", "aten::clone", "aten::_to_copy", "aten::cat", "aten::stack"):
            self.found[tuple(out.shape)] += 1
        return out


def _storage(mesh: tuple[int, int], mode: str) -> bytes:
    if mesh != (1, 1):
        open_world()
    model = build()
    owned = dedicate(model, make_mesh(mesh), mode=mode)
    group = owned.runtime.groups[0]
    index = {entry.name: i for i, entry in enumerate(group.parameters)}
    seen: dict[str, Any] = {"same": [], "owners": Counter()}

    def look(module: nn.Module, _: Any) -> None:
        size = group.buffer.element_size()
        for name, parameter in module.named_parameters(recurse=False):
            i = index[f"layers.0.moe.routed_experts.inner_experts.{name}"]
            offset = group.layout.offsets[i]
            start = group.buffer.data_ptr()
            seen["same"].append(parameter.data_ptr() == start + offset * size)
            for s in [s for s in group.layout.segments if s.parameter == i]:
                if mode == "owner":
                    (m,) = s.matrices
                    at = parameter[m.index].data_ptr()
                    seen["same"].append(at == start + s.offset * size)
                    seen["owners"][(s.row, s.column)] += 1

    experts = model.layers["0"].moe.routed_experts.inner_experts
    experts.register_forward_pre_hook(look)
    loss(model, 0, 0, 1, 1).backward()
    with _Copies() as copies:
        loss(model, 1, 0, 1, 1).backward()
    seen["copies"] = dict(copies.found)
    return pack(seen)


@pytest.mark.parametrize("mode", ["owner", "gather"])
@pytest.mark.parametrize("mesh", [(1, 1), (1, 2), (2, 2)], ids=str)
def test_the_3d_tensor_is_the_buffer(mesh: tuple[int, int], mode: str) -> None:
    """What the grouped product reads is a view of the group's buffer, each expert at the offset to
    which its owner publishes; neither way has a copy that a dense weight has not."""
    for data in run_world(mesh[0] * mesh[1], _storage, mesh, mode):
        seen = unpack(data)
        assert seen["same"] and all(seen["same"])
        if mode == "owner" and mesh == (2, 2):
            assert len(seen["owners"]) == 4 and sum(seen["owners"].values()) >= 18
        dense, w1 = seen["copies"][(40, 32)], seen["copies"][(6, 16, 32)]
        # w1 and w3 of the experts are as many as w1 and w3 of the shared experts.
        assert w1 == dense > 0, seen["copies"]


# -- the trainer -------------------------------------------------------------------------------

JOB = ["--config", "debug_qwen_moe.toml", *SMALL]
JOBS = {
    "C": [],
    "B": ["--line", "B"],
    "A": ["--line", "A"],
    "recomputed": ["--activation_checkpoint.mode", "full"],
    "chunked": ["--loss.name", "chunked_cross_entropy"],
    "Z2": ["--parallelism.fsdp_reshard_after_forward", "never"],
}


@pytest.mark.long
def test_every_line_trains(tmp_path: Path) -> None:
    """The debug job trains on four ranks on lines A, B and C; B, and C with recomputation, chunks
    of the loss or ZeRO-2, have the losses and the gradients' norms of C, load balancing included.
    """
    found = {}
    for name, options in JOBS.items():
        arguments = [*JOB, *options, "--dump_folder", str(tmp_path / name)]
        losses, curves = run_world(4, losses_and_curves, arguments, timeout_seconds=200)[0]
        assert losses[-1] < losses[0] - 0.02, name
        # Even loads give top_k = 2, loads that all go to the same experts the number of experts.
        assert all(1.99 < c["loss_metrics/load_balancing"] < 8 for c in curves), name
        found[name] = losses, [c["grad_norm"] for c in curves]
    assert found["A"][0][0] == pytest.approx(found["C"][0][0], rel=1e-6)
    for name in found.keys() - {"A", "C"}:
        for one, other in zip(found[name], found["C"], strict=True):
            assert one == pytest.approx(other, rel=1e-4), name


def _balance() -> tuple[dict[str, float], dict[str, float]]:
    from torchtitan_dmuon.metrics import ProgressMetrics

    open_world()
    metrics = object.__new__(ProgressMetrics)
    experts, dense = nn.Module(), nn.Module()
    experts.load_balancing = torch.tensor(2.0 + dist.get_rank())  # type: ignore[assignment]
    found = []
    for parts in ([dense], [experts, dense]):
        metrics.model_parts = parts
        found.append(metrics._load_balancing())
    return found[0], found[1]


def test_load_balancing_is_logged() -> None:
    """The curve of the load-balancing loss is the mean of the ranks; a dense model has none."""
    for dense, experts in run_world(2, _balance):
        assert dense == {}
        assert experts == {"loss_metrics/load_balancing": 2.5}
