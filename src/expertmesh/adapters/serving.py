"""Report what inference engines cannot read of an adapter in PEFT's format, by name, and what helps.

For the report of a save. Follows the readers of vLLM 0.33 (`vllm/lora`) and SGLang 0.5.23 (`sglang/srt/lora`), which
tests/adapters/test_serving_readers.py runs; docs/serving.md has the commands. Never imports an engine.
"""

import math
from collections.abc import Iterator

from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping

from expertmesh.adapters.plan import AdapterPlan
from expertmesh.state.model_view import ModelView

_VLLM_MOST_RANK = 512


def unread_by_engines(model: PreTrainedModel, plan: AdapterPlan) -> tuple[str, ...]:
    """Return a sentence for each thing that an engine would refuse or compute differently. No communication."""
    return (*_of_experts(model, plan), *_of_modules(plan), *_of_config(plan))


def _of_experts(model: PreTrainedModel, plan: AdapterPlan) -> Iterator[str]:
    """Yield sentences about adapters on experts."""
    weights = [target.name for target in plan.targets if target.experts is not None]
    if not weights:
        return
    rules = get_model_conversion_mapping(ModelView(model).full)
    if any(".experts.*." in f".{source}" for rule in rules for source in rule.source_patterns):
        yield (
            "vLLM, SGLang: experts of this family from keys for each expert (expertmesh export RUN --adapter-format "
            "per-expert)"
        )
    else:
        yield "SGLang: no adapters on experts that a model's files keep in one tensor; merge for it"
    endings = {name.rpartition(".")[2] for name in weights}
    if len(endings) == 1:
        yield f"vLLM: experts with an adapter on {endings.pop()} alone; it wants both matrices, so merge for it"


def _of_modules(plan: AdapterPlan) -> Iterator[str]:
    """Yield sentences about adapters on other modules."""
    names = {target.name.removesuffix(".weight").rpartition(".")[2] for target in plan.targets}
    if "kv_b_proj" in names:
        yield "vLLM: kv_b_proj, which decoding has absorbed without its adapter; merge for it"
    if ("q_proj" in names and "v_proj" not in names) or (names & {"k_proj", "v_proj"} and "q_proj" not in names):
        yield "SGLang: q_proj, k_proj or v_proj without both q_proj and v_proj; merge for it"
    if any(target.group == "router" for target in plan.targets):
        yield "SGLang: routers; merge for it"


def _of_config(plan: AdapterPlan) -> Iterator[str]:
    """Yield sentences about settings of all adapters."""
    lora = plan.lora
    if not plan.is_uniform:
        yield "vLLM, SGLang: rank_pattern and alpha_pattern, which they do not look at; merge for them"
    if lora.r > _VLLM_MOST_RANK:
        yield f"vLLM: rank {lora.r}; it takes {_VLLM_MOST_RANK} at most"
    if lora.use_rslora:
        alpha = lora.alpha * math.sqrt(lora.r)
        yield (
            f"SGLang: use_rslora, which it does not look at; for it set lora_alpha to {alpha:g} and use_rslora to "
            "false in adapter_config.json"
        )
