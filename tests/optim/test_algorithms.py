"""NorMuon, SOAP and Shampoo against their published rules, and what all rules promise."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.optim.published_rules import NorMuonRule, ShampooRule, SoapRule
from tests.runtime.reference import distance
from torchtitan_dmuon.optim.algorithms import SOAP, NorMuon, Shampoo
from torchtitan_dmuon.optim.matrix_optimizer import MatrixOptimizer, find, new_state

SHAPES = [(12, 8), (8, 12), (10, 10), (1, 9), (9, 1)]
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s[0]}x{s[1]}")

RULES: dict[str, MatrixOptimizer] = {
    "normuon": NorMuon(),
    "soap": SOAP(precondition_frequency=3),
    "shampoo": Shampoo(precondition_frequency=3),
    "shampoo alone": Shampoo(precondition_frequency=3, grafting="none", betas=(0.0, 1.0)),
    "soap, left only": SOAP(precondition_frequency=3, max_precond_dim=9),
    "shampoo, left only": Shampoo(precondition_frequency=3, max_precond_dim=9),
}
each_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
STEPS = 9


def gradients(shape: tuple[int, int], count: int = STEPS, seed: int = 0) -> list[Tensor]:
    """Related ones, as in training, and of many scales along their sides."""
    generator = torch.Generator().manual_seed(seed + 100 * shape[0] + shape[1])

    def draw(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    rows, columns = (torch.logspace(0, -1, n, dtype=torch.float64) for n in shape)
    common = draw(*shape)
    return [rows[:, None] * (common + draw(*shape)) * columns for _ in range(count)]


def run(rule: MatrixOptimizer, grads: list[Tensor], state: dict[str, Tensor] | None = None) -> Any:
    """Return the updates, and the state; computed in the dtype of the gradients."""
    if state is None:
        state = new_state(rule, *grads[0].shape, device=torch.device("cpu"), dtype=grads[0].dtype)
    return [rule.update(g, state).clone() for g in grads], state


def worst(found: list[Tensor], expected: list[Tensor]) -> float:
    return max(distance(f, e) for f, e in zip(found, expected, strict=True) if e.any())


def weights(rule: MatrixOptimizer, updates: list[Tensor], rates: list[float]) -> Tensor:
    """Apply updates as the runtime does."""
    weight = torch.ones(updates[0].shape, dtype=torch.float64)
    for update, lr in zip(updates, rates, strict=True):
        now = type(rule)(**{**rule.__dict__, "lr": lr})
        weight = weight * (1 - lr * now.weight_decay)
        weight = weight - now.adjusted_lr(*update.shape) * update.double()
    return weight


@each_shape
@pytest.mark.parametrize("authors", [False, True], ids=["paper", "authors"])
def test_normuon_is_its_paper_and_its_code(shape: tuple[int, int], authors: bool) -> None:
    """Rows are neurons whichever side is longer; options give the authors' variant."""
    options = {"nesterov": True, "adjust_lr_fn": "original"} if authors else {}
    rule = NorMuon(ns_coefficients="quintic", ns_dtype=torch.float64, lr=1.0, **options)
    grads = gradients(shape)
    reference = NorMuonRule(authors=authors)
    expected = [reference.step(g) for g in grads]
    found = [rule.adjusted_lr(*shape) * u for u in run(rule, grads)[0]]
    assert worst(found, expected) <= 1e-9
    single = NorMuon(ns_coefficients="quintic", **options, lr=1.0)
    found = [single.adjusted_lr(*shape) * u for u in run(single, [g.float() for g in grads])[0]]
    assert worst(found, expected) <= 1e-3


def test_normuon_has_its_moments_in_float32() -> None:
    """Whatever Newton-Schulz computes in (float16 on GPUs): its roundings are all there is."""
    grads = [g.float() for g in gradients((12, 8))]
    half, state = run(NorMuon(ns_dtype=torch.float16), grads)
    assert {u.dtype for u in half} | {s.dtype for s in state.values()} == {torch.float32}
    assert worst(half, run(NorMuon(), grads)[0]) <= 2**-7


@each_shape
@pytest.mark.parametrize("limit", [100, 9, 0], ids=lambda n: f"max{n}")
def test_soap_is_algorithm_3(shape: tuple[int, int], limit: int) -> None:
    """Over two refreshes, with the momentum outside the basis as the paper has it."""
    options: dict[str, Any] = {"betas": (0.9, 0.95), "shampoo_beta": 0.8, "eps": 1e-8}
    rule = SOAP(**options, precondition_frequency=3, max_precond_dim=limit)
    two_sided = (shape[0] <= limit, shape[1] <= limit)
    reference = SoapRule(**options, frequency=3, two_sided=two_sided)
    state = new_state(rule, *shape, device=torch.device("cpu"), dtype=torch.float64)
    found, expected = [], []
    for step, g in enumerate(gradients(shape)):
        expected.append(reference.step(g))
        found.append(rule.update(g, state).clone())
        if step % 3 == 0:
            adopt_bases(reference, state, first=step == 0)
    assert not found[0].any() and found[1].any()
    assert worst(found[1:], expected[1:]) <= 1e-7


def adopt_bases(reference: SoapRule, state: dict[str, Tensor], *, first: bool) -> None:
    """Check bases, and take them over: where statistics lack rank, part of them is arbitrary."""
    for i, side in enumerate(("left", "right")):
        if side not in state:
            continue
        basis = state[f"{side}_basis"]
        assert distance(basis.T @ basis, torch.eye(len(basis), dtype=torch.float64)) <= 1e-12
        if first:
            inside = basis.T @ getattr(reference, side) @ basis
            assert (inside - inside.diag().diag()).norm() <= 1e-12 * inside.norm()
            assert (inside.diag().diff() <= 1e-12 * inside.norm()).all()
        else:
            # That, and that it is orthogonal, is all that QR says.
            triangle = basis.T @ reference.iterated[i]
            assert triangle.tril(-1).norm() <= 1e-12 * triangle.norm()
        setattr(reference, f"q_{side}", basis.clone())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_soap_by_itself(dtype: torch.dtype) -> None:
    """Full rank: nothing is arbitrary, and all is computed twice, with a changing rate."""
    grads = [g.to(dtype) for g in gradients((10, 10))]
    rule, reference = SOAP(precondition_frequency=3), SoapRule(frequency=3)
    found, expected = run(rule, grads)[0], [reference.step(g) for g in grads]
    assert worst(found, expected) <= (1e-7 if dtype == torch.float64 else 5e-3)
    rates = [0.1 / (1 + i) for i in range(STEPS)]
    assert distance(weights(rule, found, rates), weights(rule, expected, rates)) <= 1e-3


@each_shape
@pytest.mark.parametrize(
    ("betas", "grafting", "limit"),
    [
        ((0.9, 0.99), "adam", 100),
        ((0.0, 1.0), "none", 100),
        ((0.9, 1.0), "adam", 100),
        ((0.9, 0.99), "adam", 9),
        ((0.9, 0.99), "none", 9),
        ((0.9, 0.99), "adam", 0),
    ],
    ids=str,
)
def test_shampoo_is_algorithm_1(
    shape: tuple[int, int], betas: tuple[float, float], grafting: Any, limit: int
) -> None:
    """With sums and no grafting it is Gupta's; else Shi's; over refreshes, at a changing rate."""
    rule = Shampoo(
        betas=betas, eps=1e-3, grafting=grafting, precondition_frequency=3, max_precond_dim=limit
    )
    reference = ShampooRule(
        betas=betas,
        eps=1e-3,
        grafting=grafting == "adam",
        frequency=3 if min(shape) <= limit else 100,
        two_sided=(shape[0] <= limit, shape[1] <= limit),
    )
    grads = gradients(shape)
    expected = [reference.step(g) for g in grads]
    found = run(rule, grads)[0]
    assert worst(found, expected) <= 1e-9
    single = run(rule, [g.float() for g in grads])[0]
    assert worst(single, expected) <= 1e-3
    rates = [0.1 / (1 + i) for i in range(STEPS)]
    assert distance(weights(rule, single, rates), weights(rule, expected, rates)) <= 1e-3


def test_shampoo_whitens() -> None:
    """Sums, one gradient, no momentum: L^-1/4 G R^-1/4 is its orthogonal factor (Gupta et al.)."""
    (g,) = gradients((8, 8), 1)
    rule = Shampoo(betas=(0.0, 1.0), grafting="none", precondition_frequency=1, eps=1e-20)
    u, _, vh = torch.linalg.svd(g)
    assert distance(run(rule, [g])[0][0], u @ vh) <= 1e-6


@each_rule
@pytest.mark.parametrize("scale", [0.0, 1e-20, 1e20, 1e-38, 1e38], ids=str)
def test_odd_gradients_give_finite_updates(rule: MatrixOptimizer, scale: float) -> None:
    """Zero, tiny, huge and of rank one, alone and after ordinary ones, over two refreshes."""
    for shape in [(1, 7), (7, 1), (6, 10), (10, 6), (1, 1)]:
        odd = [scale * torch.ones(shape)] * 4
        ordinary = [g.float() for g in gradients(shape, 4)]
        for grads in (odd + ordinary, ordinary + odd, ordinary + odd + ordinary):
            updates, state = run(rule, grads)
            assert all(u.isfinite().all() for u in updates)
            assert all(s.isfinite().all() for s in state.values())
        if scale == 0.0:
            assert not any(u.any() for u in run(rule, odd)[0])


@pytest.mark.parametrize("name", [n for n in RULES if n != "normuon"])  # its momentum is Muon's
def test_a_bad_gradient_spoils_no_statistics(name: str) -> None:
    """The runtime leaves such a step out; should one come through, solvers must not fail on it."""
    rule = RULES[name]
    grads = [g.float() for g in gradients((6, 8))]
    for value in (float("nan"), float("inf")):
        grads[3][0, 0] = value
        updates, state = run(rule, grads)
        assert all(x.isfinite().all() for x in [*updates, *state.values()])


def test_huge_gradients_keep_their_direction() -> None:
    """What is out of range is made smaller as a whole: SOAP's update has no scale."""
    grads = [g.float() for g in gradients((6, 6))]
    rule = SOAP(precondition_frequency=3, eps=1e-30)
    huge = run(rule, [g / g.abs().max() * 1e25 for g in grads])[0]
    plain = run(rule, [g / g.abs().max() for g in grads])[0]
    assert worst(huge[1:], plain[1:]) <= 5e-3


def test_bases_of_soap_have_no_scale() -> None:
    """Gradients of late training are small, their squares more so: the same bits for all that."""
    grads = [g.float() for g in gradients((6, 10))]
    rule = SOAP(precondition_frequency=3)
    plain, small = run(rule, grads)[1], run(rule, [g * 2.0**-40 for g in grads])[1]
    assert torch.equal(plain["left_basis"], small["left_basis"])
    assert torch.equal(plain["right_basis"], small["right_basis"])


def test_shampoo_keeps_its_norm_after_a_jump() -> None:
    """Roots of tiny gradients make a huge one so large that its square is not finite."""
    (g,) = gradients((6, 10), 1)
    grads = [1e-16 * g.float()] * 3 + [1e12 * g.float()]
    rule = Shampoo(precondition_frequency=3, eps=1e-30)
    found, adam = (run(r, grads)[0][-1] for r in (rule, Shampoo(max_precond_dim=0)))
    assert adam.norm() > 0.1
    assert float(found.norm() / adam.norm()) == pytest.approx(1.0, rel=1e-4)


@each_rule
@each_shape
def test_several_matrices_at_once_are_each_alone(
    rule: MatrixOptimizer, shape: tuple[int, int]
) -> None:
    """However many are updated in one call, at whatever step each is."""
    several = [[g.float() for g in gradients(shape, seed=seed)] for seed in range(3)]
    states = [run(rule, [gradients(shape, 1)[0].float()] * ahead)[1] for ahead in (1, 2, 3)]
    copies = [{k: v.clone() for k, v in s.items()} for s in states]
    alone = [run(rule, g, s) for g, s in zip(several, copies, strict=True)]
    for step in range(STEPS):
        updates = rule.updates([g[step] for g in several], states)
        for update, (expected, _) in zip(updates, alone, strict=True):
            assert (update - expected[step]).norm() <= 1e-5 * expected[step].norm()
    for state, (_, expected_state) in zip(states, alone, strict=True):
        for key, value in expected_state.items():
            assert (state[key] - value).norm() <= 1e-4 * value.norm(), key


@each_rule
@pytest.mark.parametrize("at", [1, 3, 4, 5])
def test_state_is_all_there_is_to_resume(rule: MatrixOptimizer, at: int) -> None:
    """Saved at any step and continued by a new rule: the same bits."""
    grads = [g.float() for g in gradients((8, 12))]
    expected, _ = run(rule, grads)
    _, state = run(rule, grads[:at])
    saved = {k: v.clone() for k, v in state.items()}
    group = {**rule.__dict__, "params": [], "route": "matrix"}
    found, _ = run(type(rule).of(group), grads[at:], saved)
    assert all(torch.equal(f, e) for f, e in zip(found, expected[at:], strict=True))


@each_rule
@each_shape
def test_state_is_what_was_announced_and_all_is_used(
    rule: MatrixOptimizer, shape: tuple[int, int]
) -> None:
    """Keys and shapes stay those of `state_shapes`; each is written within a period."""
    _, state = run(rule, [g.float() for g in gradients(shape, rule.period + 1)])
    announced = rule.state_shapes(*shape)
    assert state.keys() == announced.keys()
    for key, value in state.items():
        size = announced[key]
        assert value.shape == (shape if size == "elementwise" else size)
        assert value.dtype == torch.float32 and value.any(), key


@pytest.mark.gpu
@each_rule
def test_a_gpu_computes_the_same(rule: MatrixOptimizer) -> None:
    """Solvers of the device, in float32: the CPU's updates; and they stand odd gradients."""
    grads = [g.float() for g in gradients((96, 96))]
    device = torch.device("cuda")
    state = new_state(rule, 96, 96, device=device)
    found = [rule.update(g.to(device), state).cpu() for g in grads]
    assert worst(found, run(rule, grads)[0]) <= 0.02
    for odd in (0.0, 1e-20, 1e20):
        state = new_state(rule, 64, 96, device=device)
        for g in [odd * torch.ones(64, 96, device=device)] * 7:
            assert rule.update(g, state).isfinite().all()


@each_rule
def test_gradients_are_left_as_they_are(rule: MatrixOptimizer) -> None:
    """The runtime may read a gradient again; and no update is a part of the state."""
    grads = [g.float() for g in gradients((8, 12), 4)]
    copies = [g.clone() for g in grads]
    state = new_state(rule, 8, 12, device=torch.device("cpu"))
    for g in grads:
        rule.update(g, state).fill_(7.0)
    assert all(torch.equal(g, c) for g, c in zip(grads, copies, strict=True))
    expected = run(rule, copies)[1]
    assert all(torch.equal(state[k], expected[k]) for k in expected)


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        ("normuon", "beta2", 1.0),
        ("normuon", "norm_eps", 0.0),
        ("normuon", "momentum", -0.1),
        ("soap", "betas", (0.9,)),
        ("soap", "betas", (0.9, 1.0)),
        ("soap", "shampoo_beta", 1.5),
        ("soap", "eps", 0),
        ("soap", "precondition_frequency", 0),
        ("soap", "max_precond_dim", -1),
        ("soap", "max_precond_dim", 2.5),
        ("shampoo", "betas", (1.0, 0.9)),
        ("shampoo", "betas", (0.9, 0.0)),
        ("shampoo", "eps", float("nan")),
        ("shampoo", "grafting", "sgd"),
        ("shampoo", "grafting_eps", "1"),
        ("shampoo", "precondition_frequency", 1.0),
        ("shampoo", "max_precond_dim", None),
        ("shampoo", "lr", -1.0),
    ],
    ids=str,
)
def test_options_out_of_range_are_named(name: str, option: str, value: Any) -> None:
    """One line: the option, what was expected, what was given."""
    with pytest.raises(ValueError, match=f"^{option}: expected .*, got {re.escape(repr(value))}"):
        find(name)(**{option: value})


def test_options_may_come_from_toml() -> None:
    """TOML has lists and no tuples; groups are compared, so equal options must be equal."""
    assert SOAP(betas=[0.9, 0.99]) == SOAP(betas=(0.9, 0.99))  # type: ignore[arg-type]
    assert hash(Shampoo(betas=[0.9, 0.99])) == hash(Shampoo(betas=(0.9, 0.99)))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["normuon", "soap", "shampoo"])
def test_flops_grow_with_either_side(name: str) -> None:
    """What a planner balances by: positive, and more for more."""
    rule, sizes = RULES[name], (1, 2, 7, 64, 65, 1000, 8000)
    for fixed in sizes:
        for grown in ([rule.flops(fixed, s) for s in sizes], [rule.flops(s, fixed) for s in sizes]):
            assert grown[0] > 0 and all(a < b for a, b in pairwise(grown))


def test_rarer_refreshes_and_fewer_sides_cost_less() -> None:
    """The average over steps: the work of a refresh is shared by its period."""
    for kind in (SOAP, Shampoo):
        often, rare = (kind(precondition_frequency=n) for n in (1, 10))
        assert often.flops(100, 200) > rare.flops(100, 200)
        assert rare.flops(100, 200) > kind(precondition_frequency=10, max_precond_dim=100).flops(
            100, 200
        )
        assert rare.period == 10 and NorMuon().period == 1
