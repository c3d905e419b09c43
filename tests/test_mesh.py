"""Both views of the ranks against rank lists worked out by hand, and every impossible combination by its sentence."""

import gc
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import expertmesh as em
from expertmesh.config import ParallelConfig
from expertmesh.config.errors import InputError
from expertmesh.distributed.layout import (
    DENSE_AXES,
    EXPERT_AXES,
    ExpertTraffic,
    Layout,
    TopKRouter,
    ep_reason,
    explicit,
    node_crossing,
    resolve_layout,
)
from expertmesh.distributed.mesh import build_mesh, current_device, init_mesh, set_timeout
from expertmesh.experts import dispatch
from expertmesh.experts.install import Kernels
from tests.support.models import tiny_model
from tests.support.ranks import LIMIT_SECONDS, RankFailed, run_ranks, shared_ranks

LIMIT = 1

BY_HAND: list[tuple[Layout, dict[str, list[list[int]]]]] = [
    (
        Layout(fsdp=4, ep=2),
        {"fsdp": [[0, 1, 2, 3]], "ep": [[0, 1], [2, 3]], "efsdp": [[0, 2], [1, 3]]},
    ),
    (
        Layout(replicate=2, fsdp=4, ep=2),
        {
            "replicate": [[0, 4], [1, 5], [2, 6], [3, 7]],
            "fsdp": [[0, 1, 2, 3], [4, 5, 6, 7]],
            "ep": [[0, 1], [2, 3], [4, 5], [6, 7]],
            "efsdp": [[0, 2], [1, 3], [4, 6], [5, 7]],
        },
    ),
    (
        Layout(fsdp=2, tp=2, ep=4),
        {"fsdp": [[0, 2], [1, 3]], "tp": [[0, 1], [2, 3]], "ep": [[0, 1, 2, 3]], "efsdp": [[0], [1], [2], [3]]},
    ),
    (
        Layout(pp=2, fsdp=2, cp=2, ep=2),
        {
            "pp": [[0, 4], [1, 5], [2, 6], [3, 7]],
            "fsdp": [[0, 2], [1, 3], [4, 6], [5, 7]],
            "cp": [[0, 1], [2, 3], [4, 5], [6, 7]],
            "ep": [[0, 1], [2, 3], [4, 5], [6, 7]],
            "efsdp": [[0, 2], [1, 3], [4, 6], [5, 7]],
        },
    ),
]


@pytest.mark.parametrize(("layout", "groups"), BY_HAND)
def test_groups_are_those_worked_out_by_hand(layout: Layout, groups: dict[str, list[list[int]]]) -> None:
    assert {axis: layout.groups(axis) for axis in groups} == groups


@pytest.mark.parametrize(("layout", "groups"), BY_HAND)
def test_axes_of_one_view_partition_the_world(layout: Layout, groups: dict[str, list[list[int]]]) -> None:
    for axis in (*DENSE_AXES, *EXPERT_AXES):
        ranks = [rank for group in layout.groups(axis) for rank in group]
        assert sorted(ranks) == list(range(layout.world_size))


def test_data_ranks_count_replicas_and_fsdp_but_not_tp_or_cp() -> None:
    layout = Layout(replicate=2, fsdp=2, cp=1, tp=2, ep=2)
    assert [layout.data_rank(rank) for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]


# 8 experts, of which a token takes one: its row leaves a rank of ep with chance (ep - 1) / ep.
ONE_OF_EIGHT = ExpertTraffic(TopKRouter(8, 1), expert=1000 * 2**20, row=100 * 2**20, tokens=3)


@pytest.mark.parametrize(
    ("parallel", "world", "tokens", "expected"),
    [
        ({}, 8, 1, Layout(fsdp=8, ep=8)),
        ({}, 8, 2, Layout(fsdp=8, ep=4)),
        ({}, 8, 3, Layout(fsdp=8, ep=2)),
        ({}, 8, 4, Layout(fsdp=8, ep=1)),
        ({}, 6, 1, Layout(fsdp=6, ep=2)),  # which divides 8 experts
        ({"replicate": 2}, 8, 1, Layout(replicate=2, fsdp=4, ep=4)),
        ({"cp": 2, "tp": 2}, 8, 4, Layout(fsdp=2, cp=2, tp=2, ep=8)),  # a rank has a quarter of the tokens
        ({"ep": 2}, 4, None, Layout(fsdp=4, ep=2)),
        ({}, 1, None, Layout()),
    ],
)
def test_auto_takes_the_ep_that_moves_least(
    parallel: dict[str, Any], world: int, tokens: int | None, expected: Layout
) -> None:
    traffic = None if tokens is None else replace(ONE_OF_EIGHT, router=TopKRouter(8, 2), tokens=tokens)
    assert resolve_layout(ParallelConfig(**parallel), world, 8, None, traffic) == expected


def test_what_moves_is_weighed_as_the_formula_says() -> None:
    """By hand: docs/parallelism.md."""
    layouts = [Layout(fsdp=16, ep=ep) for ep in (1, 2, 4, 8)]

    def in_mib(bytes_of: Callable[[Layout], float]) -> list[float]:
        return [bytes_of(layout) / 2**20 for layout in layouts]

    assert in_mib(ONE_OF_EIGHT.gathered) == [8000 * 15 / 16, 4000 * 7 / 8, 2000 * 3 / 4, 1000 / 2]
    assert in_mib(ONE_OF_EIGHT.sent) == [0, 1200 / 2, 1200 * 3 / 4, 1200 * 7 / 8]
    # Three collectives of experts and seven of rows start.
    within = in_mib(lambda layout: ONE_OF_EIGHT.weighed(layout, 16))
    assert within == [7500 + 12, 3500 + 4 * 600 + 40, 1500 + 4 * 900 + 40, 500 + 4 * 1050 + 40]
    # On nodes of 4: rings have 4, 2, 1 and 1 adapters there; of the 7 others of 8 ranks, 4 are on another node.
    between = in_mib(lambda layout: ONE_OF_EIGHT.weighed(layout, 4))
    assert between == [7500 * 10 / 4 + 12, 3500 * 5 + 2400 + 40, 15000 + 3600 + 40, 5000 + 4200 * 40 / 7 + 40]
    recomputed = replace(ONE_OF_EIGHT, trips=5)
    assert recomputed.sent(layouts[1]) == ONE_OF_EIGHT.sent(layouts[1]) * 5 / 4


def test_auto_has_no_parts_of_nodes_and_says_why_it_is_that_ep(monkeypatch: pytest.MonkeyPatch) -> None:
    parallel, few = ParallelConfig(), replace(ONE_OF_EIGHT, tokens=1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    layout = resolve_layout(parallel, 16, 8, None, few)
    assert layout == Layout(fsdp=16, ep=8)  # two whole nodes
    assert ep_reason(parallel, replace(layout, ep=4), few) == (
        "ep 4 of 1, 2, 4, 8 moves least: 1,500.0 MiB of experts and 300.0 MiB of rows a layer and micro-batch, on "
        "nodes of 4 ranks"
    )
    assert resolve_layout(parallel, 12, 8, None, few).ep == 4
    assert resolve_layout(parallel, 12, 8, 6, few).ep == 2
    assert ep_reason(ParallelConfig(ep=4), replace(layout, ep=4), few) is None
    assert ep_reason(parallel, Layout(), few) is None
    cannot = replace(few, can_have=lambda layout: layout.ep < 4)
    assert resolve_layout(parallel, 16, 8, None, cannot).ep == 2
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert (ep_reason(parallel, layout, few) or "").endswith("of 8 ranks, assumed as LOCAL_WORLD_SIZE is not set")


SIX = "ep 4 crosses the borders of nodes of 6 ranks in 1 of its 3 groups (ranks 4 to 7), "
SIX += "whose tokens travel between nodes"


def test_groups_of_experts_cross_a_node_only_if_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "6")
    few = ExpertTraffic(TopKRouter(64, 1), expert=2**30, row=2**10, tokens=1)
    auto = resolve_layout(ParallelConfig(), 12, 64, None, few)
    assert auto.ep == 2
    assert node_crossing(auto) is None
    assert resolve_layout(ParallelConfig(ep_across_nodes=True), 12, 64, None, few) == auto
    with pytest.raises(InputError) as refusal:
        resolve_layout(ParallelConfig(ep=4), 12, 64)
    assert refusal.value.key == "layout.ep-crosses-nodes"
    what = "set parallel.ep to auto or one of 1, 2, whose groups are within a node or whole nodes, "
    assert str(refusal.value) == f"parallel.{SIX}; {what}or parallel.ep_across_nodes to true"
    with pytest.raises(InputError, match=r"auto or one of 1, 2, 3, 6, 12, whose"):
        resolve_layout(ParallelConfig(ep=4), 12)
    whole = resolve_layout(ParallelConfig(ep=12), 12)
    assert (node_crossing(whole) or "").startswith("ep 12 crosses")
    said = ParallelConfig(ep=4, ep_across_nodes=True)
    chosen = resolve_layout(said, 12, 64)
    assert ep_reason(said, chosen, few) == node_crossing(chosen) == SIX
    assert node_crossing(chosen, ranks_per_node=4) is None
    assert node_crossing(Layout(fsdp=4, ep=4)) is None  # on one node, whatever it could hold
    assert resolve_layout(explicit(chosen), 12, 64) == chosen
    many = node_crossing(Layout(fsdp=64, ep=16), ranks_per_node=8)
    assert many is not None
    assert "in 4 of its 4 groups (ranks 0 to 15 and 16 to 31 and 32 to 47 ...)" in many
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert resolve_layout(ParallelConfig(ep=4), 12, 64) == chosen  # nobody has said what a node is


@pytest.mark.parametrize(
    ("layout", "groups", "lists"),
    [
        (Layout(fsdp=4096, ep=8), [8, 512, 4096], 520),
        (Layout(replicate=8, fsdp=512, ep=8), [8, 8, 8, 64, 512], 1608),
        (Layout(pp=8, fsdp=512, ep=64), [8, 8, 8, 64, 512], 1608),
    ],
)
def test_a_rank_of_thousands_is_in_few_groups(
    monkeypatch: pytest.MonkeyPatch, layout: Layout, groups: list[int], lists: int
) -> None:
    """The counts of "Scale" in docs/launching.md."""
    made, make = [], dist.distributed_c10d._new_process_group_helper

    def counted(*arguments: Any, **options: Any) -> Any:
        made.append(arguments)
        return make(*arguments, **options)

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4096)
    monkeypatch.setattr(dist.distributed_c10d, "_new_process_group_helper", counted)
    try:
        mesh = build_mesh(layout, torch.device("cpu"))
        views = (mesh.dense, mesh.expert, mesh.dense_mesh, mesh.dense_tp_mesh)
        found = {group for view in views for group in view.get_all_groups()}
        assert len(made) == lists
        assert sorted(group.size() for group in found) == groups
    finally:
        dist.destroy_process_group()


def test_a_rank_takes_its_accelerator_also_where_it_sees_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator, taken = torch.accelerator, []
    monkeypatch.setattr(accelerator, "is_available", lambda: True)
    monkeypatch.setattr(accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(accelerator, "set_device_index", taken.append)
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("LOCAL_RANK", "3")
    for count, index in ((8, 3), (1, 0)):
        monkeypatch.setattr(accelerator, "device_count", lambda count=count: count)
        assert current_device() == torch.device("cuda", index)
    assert taken == [3, 0]
    for count, local, key in ((2, "3", "launch.too-few-accelerators"), (2, None, "launch.no-local-rank")):
        monkeypatch.setattr(accelerator, "device_count", lambda count=count: count)
        monkeypatch.setenv("LOCAL_RANK", local) if local else monkeypatch.delenv("LOCAL_RANK")
        with pytest.raises(InputError) as refusal:
            current_device()
        assert refusal.value.key == key


@pytest.mark.parametrize(
    ("parallel", "world", "experts", "sentence"),
    [
        ({"ep": 3}, 4, 8, "ep 3 does not divide fsdp * cp * tp = 4 ranks; valid values: 1, 2, 4"),
        ({"ep": 4}, 4, 6, "ep 4 does not divide the model's 6 experts; valid values: 1, 2"),
        ({"replicate": 3}, 4, 8, "replicate 3 = 3 does not divide the world size 4"),
        ({"fsdp": 2}, 4, 8, "fsdp 2 * 1 = 2, but the job has 4 ranks"),
        ({}, 4, 8, "parallel.ep: auto weighs the bytes of a model's experts and of a micro-batch's tokens"),
    ],
)
def test_impossible_layouts_are_refused_with_the_numbers(
    parallel: dict[str, Any], world: int, experts: int | None, sentence: str
) -> None:
    with pytest.raises(InputError) as refusal:
        resolve_layout(ParallelConfig(**parallel), world, experts)
    assert sentence in str(refusal.value)


def test_the_table_names_both_views() -> None:
    table = Layout(replicate=2, fsdp=4, ep=2).table()
    assert "dense   replicate      2  0 4" in table
    assert "expert  efsdp          2  0 2" in table


@pytest.mark.parametrize("world", [8, 512, 4096])
def test_meshes_of_any_size_are_built_and_agree_with_the_arithmetic(world: int) -> None:
    rank = world // 2 + 3
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        mesh = init_mesh(ParallelConfig(ep=4, replicate=2), num_experts=64, device=torch.device("cpu"))
        for axis, view in (
            ("fsdp", mesh.dense),
            ("replicate", mesh.dense),
            ("ep", mesh.expert),
            ("efsdp", mesh.expert),
        ):
            mine = next(group for group in mesh.layout.groups(axis) if rank in group)
            assert dist.get_process_group_ranks(view.get_group(axis)) == mine
        assert mesh.data_rank == rank
    finally:
        dist.destroy_process_group()


def _on_nodes_of_other_sizes(ep: int | str) -> str:
    last = dist.get_world_size() - 1
    os.environ["LOCAL_WORLD_SIZE"] = str(max(2, last) if dist.get_rank() < last else 1)
    traffic = ExpertTraffic(TopKRouter(8, 1), expert=2**30, row=2**10, tokens=1)
    try:
        parallel = ParallelConfig.model_validate({"ep": ep})
        mesh = build_mesh(resolve_layout(parallel, dist.get_world_size(), 8, None, traffic), torch.device("cpu"))
    except InputError as error:
        return error.key
    model = tiny_model("qwen3_moe")
    with pytest.raises(InputError) as refused:
        em.parallelize(model, mesh, moe=em.MoeConfig(dispatch="hierarchical", aux_loss_coef=0.0))
    assert mesh.ep_nodes is None
    return refused.value.key


def test_ranks_agree_on_the_mesh_where_nodes_have_different_numbers_of_them() -> None:
    assert shared_ranks(_on_nodes_of_other_sizes, 2, 2) == ["moe.dispatch-needs-nodes"] * 2
    assert shared_ranks(_on_nodes_of_other_sizes, 4, "auto") == ["launch.local-world-sizes-differ"] * 4


def _shard_where_one_rank_refuses(directory: str) -> list[str]:
    mesh = init_mesh(ParallelConfig(ep=2), num_experts=8)
    model, refusal = tiny_model("qwen3_moe"), InputError("no kernels here", key="moe.kernels-unsupported")
    chosen: dict[str, Any] = {"side_effect": refusal} if mesh.rank else {"return_value": Kernels()}
    found = []
    with mock.patch("expertmesh.parallel.shard_plan.choose_kernels", **chosen):
        for shard in (lambda: em.parallelize(model, mesh), lambda: em.load_model(directory, mesh)):
            with pytest.raises(InputError, match="no kernels here") as refused:
                shard()
            found.append(refused.value.key)
    return found


def test_what_one_rank_alone_cannot_run_is_refused_on_all(tmp_path: Path) -> None:
    tiny_model("qwen3_moe").save_pretrained(tmp_path)
    assert shared_ranks(_shard_where_one_rank_refuses, 2, str(tmp_path)) == [["moe.kernels-unsupported"] * 2] * 2


def _how_long_rank_0_waits_in_each_group(done: Path) -> dict[str, float]:
    """No other rank comes to a collective of rank 0."""
    mesh = init_mesh(ParallelConfig(ep=2, replicate=2), num_experts=8)
    set_timeout(mesh, LIMIT)
    waited = {}
    for axis in ("replicate", "fsdp", "efsdp", "ep") if mesh.rank == 0 else ():
        group = (mesh.expert if axis in EXPERT_AXES else mesh.dense).get_group(axis)
        started = time.monotonic()
        with pytest.raises(RuntimeError, match="Timed out"):
            dist.all_reduce(torch.ones(1), group=group)
        waited[axis] = time.monotonic() - started
    if mesh.rank == 0:
        done.touch()
    while not done.exists():
        time.sleep(0.05)
    return waited


@pytest.mark.slow(why="eight ranks that wait for a limit; that a step does not wait longer stays")
def test_the_timeout_reaches_every_group_of_both_views(tmp_path: Path) -> None:
    waited, *_ = shared_ranks(_how_long_rank_0_waits_in_each_group, 8, tmp_path / "done")
    assert list(waited) == ["replicate", "fsdp", "efsdp", "ep"]
    assert all(LIMIT <= seconds < LIMIT_SECONDS / 10 for seconds in waited.values()), waited


def _train_while_rank_1_hangs(where: str, given_up: Path) -> None:
    """One forward and backward of a real model; rank 1 does not come to `where`, and gives up after the others."""
    mesh = init_mesh(ParallelConfig(ep=2), num_experts=8)
    model = em.parallelize(tiny_model("qwen3_moe"), mesh)
    dist.barrier()
    set_timeout(mesh, 4 * LIMIT)

    def hang(*_: object, **__: object) -> None:
        while not given_up.exists():
            time.sleep(0.05)
        raise AssertionError("woken up")

    if mesh.rank == 1 and where == "a dense collective":
        next(model.children()).register_forward_pre_hook(hang, prepend=True)
    elif mesh.rank == 1:
        dispatch.all_to_all = hang
    ids = torch.arange(12)[None] + mesh.rank
    try:
        em.causal_lm_loss(model, {"input_ids": ids, "labels": ids}, target_tokens=44).backward()
    finally:
        given_up.touch()


@pytest.mark.slow_cases(r"a dense collective.*", why="the expert exchange stays")
@pytest.mark.parametrize(
    ("where", "stack"),
    [("an expert all-to-all", "in wait.*"), ("a dense collective", r"fsdp/_fully_shard.*")],
)
def test_a_training_step_does_not_wait_longer_than_the_limit(where: str, stack: str, tmp_path: Path) -> None:
    with pytest.raises(RankFailed) as failed:
        shared_ranks(_train_while_rank_1_hangs, 4, where, tmp_path / "given up")
    waiting = [said for said in re.split(r"^(?=rank \d)", str(failed.value), flags=re.M) if "woken up" not in said]
    limit = f"{stack}(Timed out waiting {4000 * LIMIT}ms|Application timeout)"
    assert any(re.search(limit, said, re.DOTALL) for said in waiting), failed.value


@pytest.mark.slow(why="an interpreter of its own")
def test_gloos_groups_are_ended_when_a_script_ends() -> None:
    script = """
import atexit
import torch.distributed as dist
import expertmesh as em
atexit.register(lambda: print("up at the end:", dist.is_initialized()))  # the last to run
em.init_mesh(em.ParallelConfig(ep=1))
print("up before:", dist.is_initialized())
"""
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    done = subprocess.run([sys.executable, "-c", script], env=os.environ | alone, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("up before: True\nup at the end: False\n")


@pytest.mark.slow(why="waits for seconds; that groups are ended stays")
def test_a_script_that_ends_waits_for_threads_that_drop_a_collectives_tensors(tmp_path: Path) -> None:
    script = """
import atexit, os, sys, time
atexit.register(sum, range(10**8))  # the last to run: keeps the interpreter until that ends
import torch, torch.distributed as dist
import expertmesh as em
from expertmesh.distributed import mesh
mesh.THREADS_REST_SECONDS = 4
from_peer, to_peer = os.pipe()
rank = 0 if os.fork() else 1
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[1], 2), rank=rank, world_size=2)
mesh.init_mesh(em.ParallelConfig(ep=1))
if rank == 1:
    os.read(from_peer, 1)
    time.sleep(0.3)
    dist.all_reduce(torch.ones(4))
    os._exit(0)
group = dist.group.WORLD
dist.all_reduce(torch.ones(4), async_op=True)  # gloo's thread has the only reference to the tensor
atexit.register(os.write, to_peer, b".")
"""
    command = [sys.executable, "-c", script, tmp_path / "store"]
    assert subprocess.run(command).returncode == 0  # -6 without the rest


def test_ranks_never_collect_the_garbage_of_the_process_that_forked() -> None:
    class Holder:
        pass

    gc.disable()
    try:
        holder: Any = Holder()
        holder.itself, holder.group = holder, dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=5))
        del holder
        run_ranks(gc.collect, 1)
    finally:
        gc.enable()
