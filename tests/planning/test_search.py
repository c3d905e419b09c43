"""Layouts, their order, and the sentences of those that cannot be; devices and routing; no rank is started."""

import gc
import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from transformers import Qwen3NextConfig

from benchmarks.shapes import deepseek_v3, qwen3_30b_a3b
from expertmesh.cli.main import main
from expertmesh.cli.plan import print_candidates
from expertmesh.config import LoraConfig, ParallelConfig, PrecisionConfig, load_config
from expertmesh.distributed.layout import Layout, TopKRouter, rows_per_token
from expertmesh.parallel.checkpointing import CheckpointingMode
from expertmesh.planning import probe
from expertmesh.planning.hardware import Devices, hardware_table, name_of, parse_devices
from expertmesh.planning.memory import memory_of, peak_of
from expertmesh.planning.model_figures import ModelFigures
from expertmesh.planning.search import Job, checkpoint_bytes, layouts, plan
from expertmesh.planning.speed import _ranks_in_node, speed_of
from expertmesh.planning.stages import Batch, Workload, pipeline_rank, resident_state
from expertmesh.planning.traffic import Transfer, bytes_between_nodes, traffic_of
from tests.families.tiny import tiny_config
from tests.support.errors import refused
from tests.support.list_models import write_own_qwen
from tests.support.models import tiny_config as family_config
from tests.support.models import tiny_model
from tests.support.planned import figures_of

GIB = 2**30


@pytest.fixture(scope="module")
def qwen() -> ModelFigures:
    return figures_of(qwen3_30b_a3b(), length=4096, precision=PrecisionConfig())


@pytest.fixture(scope="module")
def deepseek() -> ModelFigures:
    return figures_of(deepseek_v3(), length=4096, precision=PrecisionConfig(), packed=False)


def _devices(text: str) -> Devices:
    return parse_devices(text, hardware_table())


def test_parameter_counts_are_the_published_ones(qwen: ModelFigures, deepseek: ModelFigures) -> None:
    assert qwen.total == 30_532_122_624
    assert deepseek.total == 671_026_404_352
    assert sum(block.experts is not None for block in deepseek.blocks) == 58


@pytest.mark.parametrize(
    ("ranks", "router"), list(itertools.product((1, 2, 4, 8), (TopKRouter(8, 3), TopKRouter(8, 2, 4, 2))))
)
def test_rows_per_token_equals_counting_every_choice(ranks: int, router: TopKRouter) -> None:
    in_group = router.experts // router.groups
    counts = []
    for groups in itertools.combinations(range(router.groups), router.top_groups):
        reachable = [expert for expert in range(router.experts) if expert // in_group in groups]
        for experts in itertools.combinations(reachable, router.top_k):
            counts.append(len({expert * ranks // router.experts for expert in experts}))
    assert rows_per_token(router, ranks) == pytest.approx(sum(counts) / len(counts))


def test_state_of_all_ranks_is_sixteen_bytes_for_each_parameter(qwen: ModelFigures) -> None:
    for layout in (Layout(fsdp=8, ep=8), Layout(fsdp=16, ep=4), Layout(replicate=2, fsdp=8, ep=2)):
        state = resident_state(qwen, layout)
        whole = (state.frozen + state.master) * layout.fsdp
        assert whole == pytest.approx(4 * qwen.total, rel=0.001)


def test_what_each_optimizer_keeps_of_a_published_model_by_hand(qwen: ModelFigures) -> None:
    layout = Layout(fsdp=8, ep=8)
    bytes_a_parameter = {}
    for name in ("adamw", "adamw_8bit", "muon", "sgd"):
        bytes_a_parameter[name] = resident_state(qwen, layout, 0, name).moments * 8 / qwen.total
    vocabulary = 2 * 151_936 * 2048 / qwen.total  # AdamW's, as are the norms
    assert bytes_a_parameter["adamw"] == pytest.approx(8, rel=1e-4)
    assert bytes_a_parameter["adamw_8bit"] == pytest.approx(2 * (1 + 4 / 256), rel=1e-4)
    assert bytes_a_parameter["muon"] == pytest.approx(4 + 4 * vocabulary, rel=1e-4)
    assert bytes_a_parameter["sgd"] == 0


@pytest.mark.slow(why="reads a model twice, once under a collector that runs all the time")
def test_figures_do_not_depend_on_when_garbage_is_collected() -> None:
    """DeepSeek-V4's indexer makes a graph that nobody goes back through: it is free once the indexer returns."""
    config, found = tiny_config("DeepseekV4ForCausalLM", "deepseek_v4"), []
    thresholds = gc.get_threshold()
    try:
        for often in (0, 50):  # never, and all the time
            gc.set_threshold(often, 1, 1)
            model = figures_of(config, length=64, precision=PrecisionConfig())
            found.append((model.outside, *(block.figures for block in model.blocks)))
    finally:
        gc.set_threshold(*thresholds)
    assert found[0] == found[1]


@pytest.mark.slow(why="searches twice; planning/test_honest.py counts it on ranks")
def test_a_second_run_has_no_down_projection_unless_something_is_saved_behind_it(qwen: ModelFigures) -> None:
    deepseek = figures_of(deepseek_v3(), length=4096, precision=PrecisionConfig(), packed=False)
    assert {(block.figures.behind, block.figures.behind_shared > 0) for block in qwen.blocks} == {(0, False)}
    assert {block.figures.behind for block in deepseek.blocks} == {0}

    def experts(model: ModelFigures, layout: Layout, mode: CheckpointingMode) -> float:
        return speed_of(Workload(model, layout, Batch(1, 1), mode), _devices("8x8 h100")).experts

    # Three products forward and six backward; the gate and up projection again, or all three. DeepSeek's shared expert
    # runs ahead where rows travel, but not under tp.
    for model, layout, products in (
        (qwen, Layout(fsdp=64, ep=8), 11),
        (qwen, Layout(fsdp=32, tp=2, ep=8), 11),
        (deepseek, Layout(fsdp=64, ep=64), 11),
        (deepseek, Layout(fsdp=32, tp=2, ep=64), 12),
        (deepseek, Layout(fsdp=64, ep=1), 12),
    ):
        once = experts(model, layout, "none")
        assert experts(model, layout, "selective") == once
        assert experts(model, layout, "full") == pytest.approx(once * products / 9)


@pytest.mark.slow_cases(r"qwen3_moe", why="latent attention stays, whose values are padded")
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_packed_rows_are_planned_as_they_are_attended(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config, length, precision = family_config(family), 64, PrecisionConfig()
    by_samples, by_masks = (figures_of(config, length=length, precision=precision, device=d) for d in ("cuda", "cpu"))
    monkeypatch.setattr(probe, "varlen_operation", None)  # torch's own operation runs, on meta
    by_torch = figures_of(config, length=length, precision=precision)
    random_state = 2 * 8
    blocks = zip(by_samples.blocks, by_masks.blocks, by_torch.blocks, strict=True)
    for samples, masks, own in ((s.figures, m.figures, t.figures) for s, m, t in blocks):
        assert samples.mask == 0
        assert samples.saved + random_state == own.saved
        # Torch counts all pairs of queries and keys, of which a causal kernel computes half; values may be padded.
        assert samples.products + samples.attention + 2 * samples.hidden == own.products
        # Under a mask all are computed, and the mask is kept.
        assert masks.attention == samples.attention == 2 * masks.hidden
        assert masks.mask == 2 * length**2
        assert masks.saved > masks.mask
    devices = _devices("1x8 h100")
    workloads = [Workload(model, Layout(fsdp=8, ep=8), Batch(1, 1), "none") for model in (by_samples, by_masks)]
    faster, slower = (speed_of(workload, devices).attention for workload in workloads)
    # DeepSeek's values of 8 are padded to keys of 16.
    assert slower / faster == pytest.approx(2 if family == "qwen3_moe" else 2 * 24 / 32)


def test_plan_ranks_by_its_goal_and_says_why_others_do_not_fit(qwen: ModelFigures) -> None:
    job = Job(qwen, _devices("1x8 h200"), 64)
    fast, small = plan(job, "speed"), plan(job, "memory")
    assert [each.speed.seconds for each in fast.candidates] == sorted(each.speed.seconds for each in fast.candidates)
    assert small.best is not None
    assert fast.best is not None
    assert small.best.memory.total < fast.best.memory.total
    assert all(each.memory.total <= job.budget for each in fast.candidates)
    reasons = [each.reason for each in fast.rejected if each.layout.replicate == 4]
    assert reasons
    assert "does not fit: " in reasons[0]
    assert "try replicate=2 or --lora r=16" in reasons[0]
    uneven = plan(Job(qwen, _devices("1x8 h200"), 12)).rejected
    assert any(
        "12 sequences cannot be dealt evenly to 8 data ranks; try --global-batch-size 16" in r.reason for r in uneven
    )


@pytest.mark.slow(why="the devices of the table stay")
def test_sixteen_thousand_devices_are_planned(qwen: ModelFigures) -> None:
    found = plan(Job(qwen, _devices("2048x8 h100"), 16384))
    assert found.best is not None
    assert found.best.layout.world_size == 16384


def test_every_axis_is_planned_alone_and_with_others(qwen: ModelFigures) -> None:
    sizes = {(layout.pp, layout.cp, layout.tp) for layout in layouts(Job(qwen, _devices("1x8 h100"), 64))}
    assert {(2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 2)} <= sizes


@pytest.mark.parametrize("layout", [Layout(fsdp=4, tp=2, ep=8), Layout(fsdp=4, cp=2, ep=8), Layout(pp=2, fsdp=4, ep=4)])
def test_other_axes_lower_what_they_are_for(qwen: ModelFigures, layout: Layout) -> None:
    alone = memory_of(Workload(qwen, Layout(fsdp=4, ep=4), Batch(1, 4), "none"))
    split = Workload(qwen, layout, Batch(1, 4), "none")
    assert memory_of(split).total < alone.total
    axis = next(axis for axis in ("tp", "cp", "pp") if layout.size(axis) > 1)
    assert any(transfer.axis == axis for transfer in traffic_of(split))
    assert sum(_blocks(qwen, layout.pp)) == len(qwen.blocks)


@pytest.mark.slow_cases(r"gpipe-1", why="1f1b stays")
@pytest.mark.slow_cases(r"interleaved_1f1b-2", why="1f1b stays")
@pytest.mark.parametrize(("schedule", "virtual"), [("1f1b", 1), ("gpipe", 1), ("interleaved_1f1b", 2)])
def test_the_slowest_and_the_fullest_stage_count(schedule: str, virtual: int, deepseek: ModelFigures) -> None:
    """DeepSeek-V3 begins with dense blocks, so that its first stage neither works nor holds what the others do."""
    model = deepseek
    layout = Layout(pp=16, fsdp=4, tp=2, ep=8, pp_schedule=schedule, pp_virtual_stages=virtual)
    modes: tuple[CheckpointingMode, ...] = ("none", "full")
    for mode, batch in itertools.product(modes, (Batch(1, 16), Batch(1, 64))):
        workload = Workload(model, layout, batch, mode)
        peaks = [peak_of(workload, stage) for stage in range(layout.pp)]
        assert memory_of(workload).total == pytest.approx(max(peaks))
    devices, apart = _devices("16x8 h200"), Layout(fsdp=64, tp=2, ep=8)
    speed = speed_of(Workload(model, layout, Batch(1, 16), "none"), devices)
    alone = speed_of(Workload(model, apart, Batch(1, 16), "none"), devices)
    assert 4 / 58 <= speed.experts / alone.experts <= 5 / 58


@pytest.mark.slow(why="builds 48 layers; that adapters need a fraction stays")
@pytest.mark.parametrize(
    ("frozen", "bits", "linear_bits", "most"),
    [("nf4", 4.5, 4.5, 20), ("mxfp4", 4.25, 4.25, 20), ("float8", 8.002, 8.25, 32.1)],
)
def test_a_30b_model_in_4_bits_fits_a_card_of_24_gb(frozen: Any, bits: float, linear_bits: float, most: float) -> None:
    precision = PrecisionConfig(frozen=frozen)
    lora = LoraConfig(r=16, targets=("attention",))
    model = figures_of(qwen3_30b_a3b(), length=2048, precision=precision, lora=lora)
    workload = Workload(model, Layout(), Batch(1, 8), "full")
    state = resident_state(model, Layout())
    experts, linears = 48 * 128 * 3 * 2048 * 768, 48 * 2048 * (2 * 4096 + 2 * 512)
    plain = 30_532_122_624 - experts - linears
    assert state.frozen == pytest.approx(experts * bits / 8 + linears * linear_bits / 8 + 2 * plain, rel=1e-4)
    assert memory_of(workload).total <= most * GIB


def test_adapters_need_a_fraction_of_the_state(qwen: ModelFigures) -> None:
    adapted = figures_of(qwen3_30b_a3b(), length=4096, precision=PrecisionConfig(), lora=LoraConfig())
    state = resident_state(adapted, Layout(fsdp=8, ep=8))
    assert state.frozen * 8 == pytest.approx(2 * qwen.total, rel=0.001)
    assert state.master * 8 == pytest.approx(4 * (adapted.total - qwen.total), rel=0.001)


@pytest.mark.parametrize(
    ("kind", "family"), [("Qwen3MoeForCausalLM", "qwen3_moe"), ("DeepseekV3ForCausalLM", "deepseek_v3")]
)  # the latter's first block has no experts
def test_adapters_on_experts_alone_are_planned(kind: str, family: str) -> None:
    adapted = figures_of(
        tiny_config(kind, family), length=64, precision=PrecisionConfig(), lora=LoraConfig(targets=("experts",))
    )
    blocks = [block.figures for block in adapted.blocks]
    assert all(figures.saved > 0 for figures in blocks)
    assert adapted.first_saves_less > 0


@pytest.mark.parametrize(
    ("text", "key", "named"),
    [
        ("2x8 h300", "plan.unknown-device", "h300"),
        ("h100", "plan.invalid-devices", "h100"),
        ("12 h100", "plan.invalid-devices", "8 devices"),
        ("0 h100", "plan.invalid-devices", "0 devices"),
        ("2x8", "plan.invalid-devices", "2x8"),
    ],
)
def test_bad_devices_are_refused(text: str, key: str, named: str) -> None:
    with refused(key, naming=named):
        _devices(text)


@pytest.mark.parametrize(
    ("text", "nodes", "per_node"), [("8xh100", 1, 8), ("2x8xh200", 2, 8), ("2 x 8 h200", 2, 8), ("16XH200", 2, 8)]
)
def test_devices_may_be_written_as_one_word(text: str, nodes: int, per_node: int) -> None:
    found = _devices(text)
    assert (found.nodes, found.per_node) == (nodes, per_node)


@pytest.mark.parametrize(
    ("called", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA H20", "h20"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA A100-SXM4-40GB", "a100-40"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA GeForce RTX 5090", "rtx5090"),
        ("AMD Instinct MI355X", "mi355x"),
        ("Ascend910B3", "ascend910b"),
        ("Tesla T4", None),
    ],
)
def test_what_a_driver_calls_a_device_is_its_entry(called: str, name: str | None) -> None:
    assert name_of(called, hardware_table()) == name


@pytest.mark.slow_cases(r"(?!h100|mi355x|ascend910c|cpu).*", why="a row of the table each; one of each maker stays")
@pytest.mark.parametrize("name", hardware_table())
def test_every_device_of_the_table_is_planned(name: str, directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By the command line, in rows that are packed: some are of a kind that this torch does not know."""
    here = ["plan", str(directory), "--devices", f"2 {name}", "--seq-len", "64", "--global-batch-size", "4", "--json"]
    assert main(here) == 0
    assert json.loads(capsys.readouterr().out)["devices"] == f"1x2 {name}"


def test_hardware_of_the_users_joins_the_table_and_is_checked(tmp_path: Path) -> None:
    file = tmp_path / "my.yaml"
    lines = ["flops: {bfloat16: 1.0e12}", "memory: 1.0e9", "memory_bandwidth: 1.0e9", "within_node: 1.0e9"]
    sources = "{flops: me, memory: me, memory_bandwidth: me, within_node: me, between_nodes: me}"
    entry = "\n  ".join(["mine:", *lines, "between_nodes: 1.0e9", f"sources: {sources}"])
    file.write_text(entry)
    mine = parse_devices("4 mine", hardware_table(file))
    assert mine.count == 4
    peaks = [mine.hardware.peak(dtype) for dtype in ("bfloat16", "float32", "float64")]
    assert peaks == [1.0e12, 1.0e12 / 16, 1.0e12 / 32]
    assert "h100" in hardware_table(file)
    file.write_text(entry.replace("memory: 1.0e9", "memroy: 1.0e9", 1))
    with refused("plan.invalid-hardware", naming="memroy"):
        hardware_table(file)
    file.write_text(entry.replace("between_nodes: me", "other: me"))
    with refused("plan.invalid-hardware", naming="between_nodes"):
        hardware_table(file)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("model")
    model: Any = tiny_model("qwen3_moe")
    model.config.save_pretrained(root)
    return root


def test_yaml_is_a_configuration_that_train_reads(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(directory), "--devices", "4 cpu", "--seq-len", "64", "--lora", "r=8", "--yaml"]
    assert main(["plan", *arguments]) == 0
    file = tmp_path / "run.yaml"
    file.write_text(capsys.readouterr().out)
    config = load_config(file)
    assert config.lora is not None
    assert config.lora.r == 8
    assert config.data.max_length == 64
    assert isinstance(config.parallel.fsdp, int)
    assert config.parallel.fsdp * config.parallel.replicate == 4


def test_command_line_prints_the_plan_and_refuses_bad_input(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = [str(directory), "--seq-len", "64", "--devices"]
    assert main(["plan", *small, "2x2 cpu"]) == 0
    out = capsys.readouterr().out
    assert "at its peak" in out
    assert "not hidden" in out
    assert re.search(r"a checkpoint, of all ranks +\d", out)
    assert main(["plan", *small, "2x2 cpu", "--optimizer", "muon", "--simulate"]) == 2
    assert main(["plan", *small, "2x2 cpu", "--compute", "float32", "--simulate"]) == 2
    capsys.readouterr()
    assert main(["plan", *small, "2x2 cpu", "--simulate"]) == 0
    assert re.search(r"simulated +predicted +off by\n +state of a rank", capsys.readouterr().out)
    assert main(["plan", *small, "2x2 cpu", "--optimizer", "muon", "--yaml"]) == 0
    assert re.search(r"optim:\n +name: muon", capsys.readouterr().out)
    assert main(["plan", *small, "2x2 cpu", "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["candidates"][0]["memory"]["total"] > 0
    assert main(["plan", *small, "2x2 abacus"]) == 2
    assert main(["plan", *small, "2x2 cpu", "--imbalance", "nan"]) == 2
    assert main(["plan", *small, "2x2 cpu", "--lora", "r=8", "--lora", "r=4"]) == 2
    assert main(["plan", str(directory), "--devices", "2x2 cpu", "--seq-len", "1"]) == 2
    assert main(["plan", *small, "2x2 cpu", "--yaml", "--simulate"]) == 2
    assert main(["plan", *small, "2x2 cpu", "--lora", "rank=8"]) == 2
    assert main(["plan", str(directory / "nowhere"), "--devices", "1 cpu"]) == 2


def test_a_plan_without_a_batch_has_one_that_all_devices_share(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["plan", str(directory), "--seq-len", "64", "--json", "--devices"]
    for devices, count, sequences in (("2x6 cpu", 12, 72), ("3 cpu", 3, 66), ("2 cpu", 2, 64)):
        assert main([*small, devices]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["global_batch_size"] == sequences
        assert count in [each["layout"]["fsdp"] * each["layout"]["replicate"] for each in found["candidates"]]


def test_a_model_with_code_of_its_own_is_simulated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_own_qwen(tmp_path / "model")
    words = ["plan", str(tmp_path / "model"), "--devices", "2 cpu", "--seq-len", "32", "--simulate"]
    assert main([*words, "--trust-remote-code"]) == 0
    assert re.search(r"simulated +predicted +off by\n +state of a rank", capsys.readouterr().out)


def test_plan_names_the_order_of_micro_batches_and_keeps_one_that_is_set(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["plan", str(directory), "--seq-len", "64", "--devices", "2x2 cpu", "--goal", "memory"]
    found: dict[str, list[Any]] = {}
    for order in ("by_micro_batch", "by_layer", "auto"):
        assert main([*small, "--accumulate", order, "--json"]) == 0
        found[order] = json.loads(capsys.readouterr().out)["candidates"]
    orders = {order: {each["accumulate"] for each in several} for order, several in found.items()}
    assert orders["by_micro_batch"] == {"by_micro_batch"}
    assert orders["by_layer"] == {"by_layer"}
    assert {each["layout"]["pp"] for each in found["by_layer"]} == {1}
    for each in found["auto"]:
        by_layer = each["activation_checkpointing"] == "full" and each["accumulation"] > 1 and each["layout"]["pp"] == 1
        assert each["round"] == (each["accumulation"] if by_layer else 1)
    assert main([*small, "--accumulate", "by_layer"]) == 0
    assert " by layer" in capsys.readouterr().out
    assert main([*small, "--accumulate", "by_layer", "--yaml"]) == 0
    assert "accumulate: by_layer" in capsys.readouterr().out


def test_plan_says_what_it_assumes_and_nothing_of_what_is_given(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def assumed(*options: str) -> tuple[dict[str, str], dict[str, Any]]:
        assert main(["plan", str(directory), "--devices", "2x2 cpu", "--json", *options]) == 0
        found = json.loads(capsys.readouterr().out)
        return found["assumed"], found

    silent, found = assumed()
    assert (found["seq_len"], found["global_batch_size"], found["imbalance"]) == (128, 64, 1.0)
    assert silent["--seq-len"] == "128 tokens, and every row is full"  # the model has no more positions
    assert silent["--global-batch-size"] == "64 sequences"
    assert silent["--imbalance"] == "tokens are spread evenly over experts"
    assert (silent["--params"], silent["--compute"], silent["--optimizer"]) == ("float32", "bfloat16", "adamw")
    assert silent["--hardware"].startswith("1 GB/s within a node, 1 GB/s between nodes; ")
    given = ["--seq-len", "64", "--global-batch-size", "8", "--lora", "r=8", "--imbalance", "2", "--no-packing"]
    spoken, found = assumed(*given, "--compute", "float32", "--optimizer", "sgd")
    assert spoken.keys() == {"--hardware", "--params"}
    assert found["seq_len"] == 64
    assert main(["plan", str(directory), "--devices", "2 cpu"]) == 0
    assert re.search(r"assumed, .*\n +--seq-len +128 tokens", capsys.readouterr().out)


def test_groups_that_cross_a_node_are_named_and_their_bytes_go_outside(
    qwen: ModelFigures, capsys: pytest.CaptureFixture[str]
) -> None:
    job = Job(qwen, _devices("2x6 h200"), 96)
    by_ep = {candidate.layout.ep: candidate for candidate in plan(job, "memory").candidates}
    console = Console(width=200)
    print_candidates(console, "qwen", job, [by_ep[4], by_ep[4]])
    said = capsys.readouterr().out
    assert said.count("ep 4 crosses the borders of nodes of 6 ranks in 1 of its 3 groups (ranks 4 to 7)") == 1
    assert "whose tokens travel between nodes" in said
    print_candidates(console, "qwen", job, [by_ep[2]])
    assert "crosses" not in capsys.readouterr().out
    sizes = [_ranks_in_node(Layout(fsdp=24, ep=ep), node)["ep"] for ep, node in ((4, 6), (4, 8), (8, 4), (3, 8))]
    assert sizes == [2, 4, 4, 1]  # the fewest of a group that share a node


@pytest.mark.parametrize("layout", [Layout(fsdp=8), Layout(cp=8), Layout(tp=8), Layout(fsdp=2, cp=4)])
def test_shards_that_one_node_holds_never_travel_between_nodes(qwen: ModelFigures, layout: Layout) -> None:
    devices = _devices("1x8 h200")
    speed = speed_of(Workload(qwen, layout, Batch(1, 1), "none"), devices)
    gathers = [link for link in speed.links if link.transfer.axis == "fsdp" and link.transfer.kind == "all_gather"]
    assert gathers
    for link in gathers:
        rate = devices.hardware.within_node * devices.hardware.efficiency.links
        fastest = link.transfer.wire / rate + link.transfer.calls * devices.hardware.collective_seconds
        assert link.seconds == pytest.approx(fastest)


@pytest.mark.parametrize(
    ("axis", "kind", "layout", "leaving"),
    [
        ("ep", "all_to_all", Layout(fsdp=4, ep=4), 120 / 2),  # half of each rank's rows
        ("ep", "all_to_all", Layout(fsdp=4, ep=2), 0),
        ("ep", "all_to_all", Layout(fsdp=6, ep=3), 120 * (1 / 3 + 1 / 3 + 2 / 3) / 3),  # 0 1 | 2, 3 | 4 5
        ("fsdp", "all_gather", Layout(fsdp=4), 120 * 3 / 4 / 2),  # one of the two ranks of a node sends to the other
        ("fsdp", "all_reduce", Layout(fsdp=4), 2 * 120 * 3 / 4 / 2),
        ("efsdp", "all_gather", Layout(fsdp=4, ep=2), 120 / 2),  # ranks 0 and 2: each on a node of its own
        ("tp", "all_gather", Layout(fsdp=2, tp=2), 0),
        ("fsdp", "all_gather", Layout(fsdp=2, tp=2), 120 / 2),
        ("pp", "send", Layout(pp=2, fsdp=2), 120),
    ],
)
def test_what_leaves_a_node_of_two_ranks_by_hand(axis: str, kind: Any, layout: Layout, leaving: float) -> None:
    transfer = Transfer(axis, kind, 1, 120, layout.size(axis))
    assert bytes_between_nodes(transfer, layout, per_node=2) == pytest.approx(leaving)
    assert bytes_between_nodes(transfer, layout, per_node=8) == 0


def test_a_checkpoint_holds_masters_and_two_moments_of_one_copy(qwen: ModelFigures) -> None:
    job = Job(qwen, _devices("2x8 h200"), 64)
    for layout in (Layout(fsdp=16, ep=8), Layout(replicate=2, fsdp=8, ep=8), Layout(pp=2, fsdp=8, ep=8)):
        assert checkpoint_bytes(job, layout) == pytest.approx(12 * qwen.total, rel=0.001)


def test_axes_given_by_the_user_are_kept(qwen: ModelFigures) -> None:
    job = Job(qwen, _devices("1x8 h200"), 64)
    found = plan(job, fixed=ParallelConfig(ep=4, replicate=1))
    assert {(each.layout.ep, each.layout.replicate) for each in found.candidates} == {(4, 1)}


def test_what_train_refuses_for_a_model_is_not_ranked(qwen: ModelFigures) -> None:
    found = plan(Job(qwen, _devices("1x8 h200"), 64))
    reasons = {each.layout: each.reason for each in found.rejected}
    # 4 key and value heads.
    assert all(each.layout.tp <= 4 for each in found.candidates)
    assert any("k_proj of qwen3_moe has 4 heads" in reason for layout, reason in reasons.items() if layout.tp == 8)
    config = Qwen3NextConfig(
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        linear_num_key_heads=4,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
    )
    linear = figures_of(config, length=64, precision=PrecisionConfig(), packed=False)
    assert linear.feasibility.refusal(Layout(cp=2)) is None
    gathered = [block.parts.rows_by_heads for block in linear.blocks]
    assert gathered == [1, 1, 1, 0]  # delta nets, and attention that exchanges
    assert linear.feasibility.refusal(Layout(pp=5)) is not None  # of 4 blocks
    assert linear.feasibility.refusal(Layout(pp=2, tp=2)) is None


def test_what_a_family_keeps_in_float32_is_gathered_so() -> None:
    model = figures_of(tiny_config("DeepseekV4ForCausalLM", "deepseek_v4"), length=64, precision=PrecisionConfig())
    uncast = model.blocks[0].uncast
    assert uncast is not None
    assert {weight.compute for weight in uncast.weights} == {4}
    assert {weight.compute for weight in model.blocks[0].own.weights} == {2}


def test_blocks_that_read_what_one_has_chosen_are_planned_with_it() -> None:
    """The first that read are behind blocks that are like others, and so not measured."""
    full, shared = "full", "shared"
    types = {"num_hidden_layers": 7, "indexer_types": [full, full, full, shared, shared, full, shared]}
    config = tiny_config("GlmMoeDsaForCausalLM", "glm_moe_dsa", **types)
    model = figures_of(config, length=64, precision=PrecisionConfig())
    kinds = [model.blocks.index(block) for block in model.blocks]
    assert kinds == [0, 1, 1, 3, 3, 1, 3]  # dense, and with experts each of both
    assert model.blocks[1].figures.saved != model.blocks[3].figures.saved
    starts = {stage[0] for stage in model.feasibility.stages(4)}
    assert starts == {0, 1, 2, 5}
    assert "only before block 1, 2, 5" in str(model.feasibility.refusal(Layout(pp=5)))


def test_stages_are_those_that_training_cuts(qwen: ModelFigures) -> None:
    assert _blocks(qwen, 2) == [27, 21]


def _blocks(model: ModelFigures, pp: int) -> list[int]:
    return [len(pipeline_rank(model, pp, 1, stage).chunks[0]) for stage in range(pp)]
