"""Conversion rules for models whose experts are a list of MLPs: the files hold one tensor per expert and linear layer.

The list is fused in memory (experts/module_list.py). These rules have the form of transformers' own rules: loading
stacks the experts of the files by byte ranges, and saving writes them back under their original names.
"""

from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import Concatenate, ConversionOps, MergeModulelist, WeightConverter

from expertmesh.compat import set_weight_conversions, weight_conversions
from expertmesh.experts.module_list import FusedExperts
from expertmesh.introspection.block_proof import fuse_module_lists


def fuse_lists_of_experts(model: PreTrainedModel) -> None:
    """Fuse every list of experts in place and remember how the files hold them.

    Raises:
        InputError: A list cannot be fused.
    """
    rules = get_model_conversion_mapping(model, add_legacy=False)
    if fuse_module_lists(model):
        known = weight_conversions(model) or rules
        set_weight_conversions(model, [*known, *list_rules(model)])


def list_rules(model: nn.Module) -> list[WeightConverter]:
    """Return the rules from per-expert tensors to fused ones, for the lists that were fused in `model`."""
    kinds: dict[tuple[str, tuple[str, ...], str, bool], None] = {}
    for name, module in model.named_modules():
        if isinstance(module, FusedExperts):
            parent = name.rpartition(".")[0]
            leaf = parent.rpartition(".")[2]
            # The last component gives one rule for all layers. A bare number would also match other modules.
            kinds[parent if leaf.isdigit() else leaf, module.ups, module.down, module.has_bias] = None
    return [rule for kind in kinds for rule in _rules(*kind)]


def _rules(parent: str, ups: tuple[str, ...], down: str, biased: bool) -> list[WeightConverter]:
    rules = []
    up = "gate_up_proj" if len(ups) == 2 else "up_proj"
    for leaf, end in (("weight", ""), ("bias", "_bias"))[: 1 + biased]:
        for linears, target in ((ups, up), ((down,), "down_proj")):
            operations: list[ConversionOps] = [MergeModulelist(dim=0)]
            if len(linears) > 1:
                operations.append(Concatenate(dim=1))
            sources = [f"{parent}.experts.*.{linear}.{leaf}" for linear in linears]
            rules.append(WeightConverter(sources, f"{parent}.experts.{target}{end}", operations))
    return rules
