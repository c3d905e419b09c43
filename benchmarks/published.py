"""What the planner predicts for runs that others have published: the last table of docs/formulas.md.

    python -m benchmarks.published

For the layout, sequence length and precision that a source states. What it does not state is taken as in `Run`: one
sequence a micro-batch, one micro-batch a step and stage, checkpointing of whole blocks, balanced routing.
"""

from collections.abc import Callable
from dataclasses import dataclass

from transformers import PreTrainedConfig

from expertmesh.config import LoraConfig, ParallelConfig, PrecisionConfig
from expertmesh.distributed.layout import resolve_layout
from expertmesh.parallel.checkpointing import CheckpointingMode
from expertmesh.planning.hardware import Devices, hardware_table, parse_devices
from expertmesh.planning.search import Job, evaluate
from expertmesh.planning.stages import Batch
from tests.support.planned import figures_of

from .shapes import deepseek_v3, qwen3_30b_a3b

H800_LINK = 200e9  # H100 with NVLink of 400 GB/s in both directions together
K = 1024


@dataclass(frozen=True, slots=True)
class Run:
    """A published run: tokens per second and device, GiB of a device (None: not published), and where."""

    name: str
    shape: Callable[[], PreTrainedConfig]
    devices: str
    parallel: ParallelConfig
    tokens: float
    memory: float | None
    source: str
    length: int = 4 * K
    lora: bool = False
    mode: CheckpointingMode = "full"
    rows: int = 1
    accumulation: int = 1


def qwen3_235b_a22b() -> PreTrainedConfig:
    """94 layers of 128 experts, top-8."""
    sizes = {"hidden_size": 4096, "num_hidden_layers": 94, "num_attention_heads": 64, "moe_intermediate_size": 1536}
    return _changed(qwen3_30b_a3b(), sizes)


def deepseek_v3_16b() -> PreTrainedConfig:
    """torchtitan's 16B flavour: 27 layers, 26 of them with 64 experts, top-6, and two shared ones."""
    sizes = {
        "vocab_size": 102400,
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "n_shared_experts": 2,
        "n_routed_experts": 64,
        "num_experts_per_tok": 6,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": None,
    }
    return _changed(deepseek_v3(), sizes)


def _changed(config: PreTrainedConfig, values: dict[str, int | None]) -> PreTrainedConfig:
    for name, value in values.items():
        assert hasattr(config, name), name
        setattr(config, name, value)
    return config


EP8 = ParallelConfig(ep=8)
QWEN = "Qwen3-30B-A3B"
RUNS = (
    Run(QWEN, qwen3_30b_a3b, "8 h200", ParallelConfig(ep=1), 4379, 106, "prime-rl benchmarks", length=16 * K),
    Run(QWEN, qwen3_30b_a3b, "8 h100", ParallelConfig(ep=1), 4138, 31.6, "prime-rl", length=16 * K, lora=True),
    Run(QWEN, qwen3_30b_a3b, "8 h100", ParallelConfig(ep=1), 2925, 63.7, "prime-rl", length=64 * K, lora=True),
    Run(QWEN, qwen3_30b_a3b, "8 h100", EP8, 3075, 68.2, "transformers 5 (HF and NVIDIA, June 2026)"),
    Run(QWEN, qwen3_30b_a3b, "8 h100", EP8, 12040, None, "NeMo Automodel, balanced gate"),
    Run(QWEN, qwen3_30b_a3b, "2x8 h100", ParallelConfig(ep=16), 13000, 62.2, "Megatron-Bridge", mode="none"),
    Run("DeepSeek-V3 of 16 B", deepseek_v3_16b, "8 h100", EP8, 11600, 73, "torchtitan 1789"),
    Run("Qwen3-235B-A22B", qwen3_235b_a22b, "32x8 h800", ParallelConfig(ep=1), 2000, None, "XTuner"),
    Run("DeepSeek-V3", deepseek_v3, "128x8 h100", ParallelConfig(ep=64, pp=4), 865, None, "Automodel", accumulation=16),
)


def line(run: Run) -> str:
    """Return one row of the table."""
    devices = _devices(run.devices)
    lora = LoraConfig(r=16) if run.lora else None
    model = figures_of(run.shape(), length=run.length, precision=PrecisionConfig(), lora=lora, packed=False)
    layout = resolve_layout(run.parallel, devices.count, model.anatomy.num_experts)
    rows = run.rows * run.accumulation * layout.data_ranks
    job = Job(model, devices, rows)
    found = evaluate(job, layout, run.mode, Batch(run.rows, run.accumulation))
    tokens, peak = found.tokens_per_second / devices.count, found.memory.total / 2**30
    axes = ", ".join(f"{axis} {layout.size(axis)}" for axis in ("pp", "ep") if layout.size(axis) > 1) or "FSDP"
    lora_text = ", LoRA r16" if run.lora else ""
    shape = f"{run.length // K}k{f', micro-batch {run.rows}' if run.rows > 1 else ''}, {run.mode}"
    published = f"{run.tokens:,.0f}" + (f"; {run.memory:g}" if run.memory is not None else "")
    count = f"{devices.count:,}×{devices.name.upper()}"
    return (
        f"| {run.name}{lora_text}, {count}, {axes}, {shape} ({run.source}) | {published} | {tokens:,.0f}; {peak:.1f} | "
        f"{tokens / run.tokens - 1:+.0%} |"
    )


def _devices(text: str) -> Devices:
    table = hardware_table()
    table["h800"] = table["h100"].model_copy(update={"within_node": H800_LINK})
    return parse_devices(text, table)


def main() -> None:
    print("| run (source) | published | predicted | speed |\n|---|---|---|---|")
    for run in RUNS:
        print(line(run), flush=True)


if __name__ == "__main__":
    main()
