"""What the planner predicts for the two orders of micro-batches: over slow links, and with experts in host memory.

    python -m benchmarks.orders

Predictions, not measurements. Sequences of 4,096 tokens, `full` checkpointing, rounds as large as fit. Two nodes train
all weights; one card trains adapters on attention beside frozen experts in 4 bits that stay in host memory.
"""

from collections.abc import Callable
from dataclasses import replace

from transformers import GptOssConfig, PreTrainedConfig

from expertmesh.config import LoraConfig, PrecisionConfig
from expertmesh.config.sections import Accumulate
from expertmesh.distributed.layout import Layout
from expertmesh.planning.hardware import Devices, hardware_table, parse_devices
from expertmesh.planning.model_figures import ModelFigures
from expertmesh.planning.search import GIB, Candidate, Job, evaluate
from expertmesh.planning.stages import Batch
from expertmesh.planning.traffic import bytes_between_nodes, host_copies
from tests.support.planned import figures_of

from .shapes import deepseek_v3, qwen3_30b_a3b

LENGTH = 4096
ORDERS: tuple[Accumulate, ...] = ("by_micro_batch", "by_layer")
# Bytes per second of one of 8 GPUs: an adapter of its own, or a node's shared by all.
LINKS = {"25 GB/s a GPU": 25e9, "100 Gb Ethernet a node": 12.5e9 / 8}
Shape = Callable[[], PreTrainedConfig]
CARDS: tuple[tuple[str, Shape, str, str], ...] = (
    ("Qwen3-30B-A3B", qwen3_30b_a3b, "nf4", "rtx4090"),
    ("GPT-OSS-120B", GptOssConfig, "mxfp4", "rtx4090"),
    ("DeepSeek-V3", deepseek_v3, "nf4", "l40s"),
)


def main() -> None:
    print("| links | ep | order | to other nodes | peak | s a step | tokens/s |\n|---|---|---|---|---|---|---|")
    model = figures_of(qwen3_30b_a3b(), length=LENGTH, precision=PrecisionConfig())
    nodes = parse_devices("2x8 h100", hardware_table())
    for link, rate in LINKS.items():
        devices = replace(nodes, hardware=nodes.hardware.model_copy(update={"between_nodes": rate}))
        for ep in (8, 1):
            for order in ORDERS:
                job = Job(model, devices, 256, accumulate=order)
                found = evaluate(job, Layout(fsdp=16, ep=ep), "full", Batch(1, 16))
                crossing = sum(bytes_between_nodes(each.transfer, found.layout, 8) for each in found.speed.links)
                print(f"| {link} | {ep} | {_order(found)} | {crossing / 1e9:.0f} GB | {_speed(found)} |", flush=True)
    print("\n| model | card | micro-batch | order | host memory | copies a step | peak | s a step | tokens/s |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name, shape, frozen, card in CARDS:
        precision = PrecisionConfig(frozen=frozen)  # type: ignore[arg-type]
        lora = LoraConfig(r=8, targets=("attention",))
        model = figures_of(shape(), length=LENGTH, precision=precision, lora=lora)
        _print_card(name, model, parse_devices(f"1 {card}", hardware_table()))


def _print_card(name: str, model: ModelFigures, devices: Devices) -> None:
    experts = [block.experts for block in model.blocks if block.experts is not None]
    packed = sum(
        each.spec.num_experts * sum(w.elements * w.bytes for w in each.matrices if w.packed) for each in experts
    )
    for rows in (1, 2):
        for order in ORDERS:
            job = Job(model, devices, 16, accumulate=order, offload="experts")
            found = evaluate(job, Layout(offload="experts"), "full", Batch(rows, 16 // rows))
            copies = host_copies(found.workload, 0).bytes / 1e9
            cells = f"{name} | {devices.name} | {rows} x {16 // rows} | {_order(found)} | {packed / GIB:.0f} GiB"
            print(f"| {cells} | {copies:,.0f} GB | {_speed(found)} |", flush=True)


def _order(found: Candidate) -> str:
    batch = found.workload.batch
    return f"by layer, {batch.together} a round" if batch.together else "by micro-batch"


def _speed(found: Candidate) -> str:
    return f"{found.memory.total / GIB:.1f} GiB | {found.speed.seconds:,.1f} | {found.tokens_per_second:,.0f}"


if __name__ == "__main__":
    main()
