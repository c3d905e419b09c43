"""How much slower `ep: auto` is than the best ep by the planner's times: `python -m benchmarks.auto_ep`.

Published models, device kinds and micro-batches, full fine-tuning and adapters. docs/parallelism.md has the result,
beside that of the largest ep within a node. Some minutes; no GPU.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

from transformers import AutoConfig

from expertmesh.config import LoraConfig, PrecisionConfig
from expertmesh.distributed.layout import Layout, divisors, least_moved
from expertmesh.planning.hardware import hardware_table, parse_devices
from expertmesh.planning.search import Candidate, Job, evaluate
from expertmesh.planning.stages import Batch
from tests.support.planned import figures_of

PUBLISHED = Path(__file__).parents[1] / "tests" / "published"
MODELS = (
    "Qwen--Qwen3-30B-A3B", "allenai--OLMoE-1B-7B-0924-Instruct", "openai--gpt-oss-20b", "zai-org--GLM-4.5-Air",
    "mistralai--Mixtral-8x7B-Instruct-v0.1", "deepseek-ai--DeepSeek-V3-Base",
)  # fmt: skip
DEVICES = ("2 h100", "8 h100", "64 h100", "16 h200", "8 a100", "8 mi300x", "8 rtx4090", "8 cpu")


def _jobs() -> Iterator[list[Candidate]]:
    """For each job, a candidate for each ep without parts of nodes."""
    table = hardware_table()
    for name, lora, length in product(MODELS, (None, LoraConfig()), (512, 4096)):
        content = json.loads((PUBLISHED / f"{name}.json").read_text())
        content = {key: value for key, value in content.items() if key not in ("quantization_config", "auto_map")}
        config, precision = AutoConfig.for_model(**content), PrecisionConfig()
        model = figures_of(config, length=length, precision=precision, lora=lora, packed=False)
        for text, rows, mode in product(DEVICES, (1, 2, 8), ("none", "full")):
            devices = parse_devices(text, table)
            job = Job(model, devices, 4 * rows * devices.count)
            sizes = [ep for ep in divisors(devices.count) if model.anatomy.num_experts % ep == 0]
            whole = [ep for ep in sizes if devices.per_node % ep == 0 or ep % devices.per_node == 0]
            layouts = [Layout(fsdp=devices.count, ep=ep) for ep in whole]
            found = [evaluate(job, each, mode, Batch(rows, 4)) for each in layouts if model.traffic.can_have(each)]
            if found:
                yield found


def _auto(found: list[Candidate]) -> Candidate:
    workload = found[0].workload
    tokens, trips = workload.batch.rows * workload.model.length, 5 if workload.mode == "full" else 4
    traffic = replace(workload.model.traffic, tokens=tokens, trips=trips, can_have=lambda layout: True)
    chosen = least_moved([each.layout for each in found], traffic, min(8, workload.layout.world_size))
    return next(each for each in found if each.layout == chosen)


def _largest(found: list[Candidate]) -> Candidate:
    """Within a node."""
    return max((each for each in found if each.layout.ep <= 8), key=lambda each: each.layout.ep, default=found[-1])


def main() -> None:
    jobs = list(_jobs())
    rules: dict[str, Callable[[list[Candidate]], Candidate]] = {"ep: auto": _auto, "largest within a node": _largest}
    for name, rule in rules.items():
        best = (min(each.speed.seconds for each in found) for found in jobs)
        more = sorted(rule(found).speed.seconds / least - 1 for found, least in zip(jobs, best, strict=True))
        mean, tenth = sum(more) / len(more), more[int(0.9 * len(more))]
        print(f"{name}: {len(jobs):,} jobs, mean {mean:.1%} slower, a tenth over {tenth:.1%}, at most {more[-1]:.0%}")


if __name__ == "__main__":
    main()
