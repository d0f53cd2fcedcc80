"""Volumes of a step against those of the paper's sections 2.2, 3.2 and 4.4."""

from __future__ import annotations

import pytest

from torchtitan_dmuon.planner.traffic import Network, Volumes, traffic

P = 1_000_000


def volumes(**changes: object) -> Volumes:
    values = {
        "mode": "owner",
        "layers": P,
        "rest": 0,
        "matrices": P,
        "param_bytes": 2,
        "reduce_bytes": 2,
        "gathers": 1,
        "micro_batches": 1,
    }
    return Volumes(**{**values, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("gathers", [1, 2])
@pytest.mark.parametrize("nodes", [1, 2, 16])
def test_fsdp_sends_two_or_three_times_the_parameters(nodes: int, gathers: int) -> None:
    """(N - 1) / N of the bytes, twice under ZeRO-2, three times under ZeRO-3."""
    ranks = 8 * nodes
    got = traffic(Network(1, ranks, 8), volumes(gathers=gathers))
    assert got.inside + got.across == pytest.approx((1 + gathers) * 2 * P * (ranks - 1) / ranks)
    assert (got.across == 0) == (nodes == 1)


@pytest.mark.parametrize("nodes", [2, 4, 32])
def test_hsdp_crosses_nodes_twice_r_minus_one_times(nodes: int) -> None:
    """All ranks together: 2 (R - 1) P_W across nodes, reduction and publish alike."""
    network = Network(nodes, 8, 8)
    got = traffic(network, volumes())
    ranks = 8 * nodes
    assert got.across * ranks == pytest.approx(2 * (nodes - 1) * 2 * P)
    assert got.publish_across == pytest.approx(got.reduce_across)
    plain = traffic(network, volumes(mode="fsdp"))
    assert plain.across == pytest.approx(got.across) and plain.publish_across == 0


def test_rows_within_a_node_do_not_cross() -> None:
    """2 x 2 ranks on one node of four: everything stays inside."""
    got = traffic(Network(2, 2, 4), volumes())
    assert got.across == 0 and got.publish_inside == pytest.approx(2 * P / 4)


def test_accumulation_repeats_what_is_per_micro_batch() -> None:
    """Gathers and both levels of the reduction; new weights are published once."""
    network = Network(4, 8, 8)
    one, four = traffic(network, volumes()), traffic(network, volumes(micro_batches=4))
    assert four.gather_inside == 4 * one.gather_inside
    assert four.reduce_inside == 4 * one.reduce_inside
    assert four.reduce_across == 4 * one.reduce_across
    assert four.publish_across == one.publish_across


def test_the_gather_baseline_pays_in_the_optimizer() -> None:
    """Line B: gradient and momentum of every matrix on every rank of a row, in float32."""
    got = traffic(Network(1, 16, 8), volumes(mode="gather"))
    assert got.optimizer_inside + got.optimizer_across == pytest.approx(8 * P * 15 / 16)


def test_one_process_sends_nothing() -> None:
    got = traffic(Network(1, 1, 8), volumes())
    assert got.inside == got.across == 0


def test_rows_that_straddle_nodes_cross_them() -> None:
    """3 x 8 ranks on two nodes of 12: the second row has ranks on both, the others do not."""
    network = Network(3, 8, 12)
    inside, across = network.in_rows(P)
    assert across == pytest.approx(P * (1 / 3) / 8)
    assert inside + across == pytest.approx(P * 7 / 8)
    # Ranks 0, 8 and 16, ... 3, 11 and 19: on two nodes; and so are 4, 12, 20 to 7, 15, 23.
    inside, across = network.in_columns(P)
    assert (inside, across) == pytest.approx((P / 24, P / 24))


@pytest.mark.parametrize("rows", [1, 2, 3, 5])
@pytest.mark.parametrize("columns", [1, 2, 3, 4, 6, 8])
@pytest.mark.parametrize("gpus_per_node", [1, 2, 3, 4, 8, 12])
def test_nodes_of_rows_and_columns(rows: int, columns: int, gpus_per_node: int) -> None:
    """Counted rank by rank: a node's first rank gets the bytes from another node."""

    def crossings(lines: list[list[int]]) -> float:
        return sum(len({rank // gpus_per_node for rank in line}) - 1 for line in lines)

    network, ranks = Network(rows, columns, gpus_per_node), rows * columns
    grid = [[r * columns + c for c in range(columns)] for r in range(rows)]
    turned = [list(line) for line in zip(*grid, strict=True)]
    assert network.in_rows(P)[1] * ranks == pytest.approx(P * crossings(grid))
    assert network.in_columns(P)[1] * ranks == pytest.approx(P * crossings(turned) / columns)
