"""Keep experts equally busy: choose a model's router losses, and update its routers' correction biases.

`balance_of` turns the `moe` section and the model's own config into numbers, or refuses by name what would not be
exact. Once per optimizer step each expert's bias moves by a fixed rate towards the mean load (DeepSeek-V3, arXiv
2408.15664); the optimizer does not train biases. The router losses are sums of terms of each layer's logits:

    load balancing   E * sum_e F_e * P_e     F_e chosen pairs, P_e summed softmax of the logits, per token and layer
    z-loss           mean over tokens and layers of logsumexp(logits)^2 (arXiv 2202.08906)

The first is transformers' `load_balancing_loss_func`, term by term and in its dtypes: tokens of all layers count
equally, choices are the top k of the softmax (whatever the router chose), and padding is left out. Families with
another function are recognised by its values.

    T tokens, L layers with a bias, E experts
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from expertmesh.anatomy import Anatomy
from expertmesh.compat import declared
from expertmesh.config import MoeConfig
from expertmesh.config.errors import InputError
from expertmesh.experts.layer import TokensPerExpert, layer_of
from expertmesh.experts.module_list import FusedExperts
from expertmesh.experts.pairs import count_pairs
from expertmesh.state.model_view import is_adapter, mesh_of, sharded, stage_names
from expertmesh.state.shards import cut_local, local_tensor

_BIAS_NAMES = ("e_score_correction_bias", "expert_bias")  # added to the scores for the choice alone, in every family


@dataclass(frozen=True, slots=True)
class Balance:
    """The router balance of one model."""

    aux_loss_coef: float = 0.0
    """The factor of the load-balancing loss; 0.0 for none."""
    z_loss_coef: float = 0.0
    """The factor of the z-loss; 0.0 for none."""
    bias_update_rate: float = 0.0
    """0 for no update."""
    num_experts: int = 0
    """E."""
    top_k: int = 0
    """Experts per token in the auxiliary loss."""
    biases: tuple[tuple[str, str], ...] = ()
    """Names of an experts module and of the bias that its router adds, in pairs; empty without an update."""
    beside_the_models: bool = False
    """True if `moe` asks for a loss that the model's own loss does not have."""

    @property
    def has_losses(self) -> bool:
        """True if there is a router loss."""
        return bool(self.aux_loss_coef or self.z_loss_coef)


def balance_of(model: nn.Module, anatomy: Anatomy, moe: MoeConfig) -> Balance:
    """Return what `moe` means for `model`, which may be on meta. Raises `InputError` for what would not be exact."""
    family = model.config.model_type  # type: ignore[union-attr]
    aux, setting = _aux_loss_coef(model, moe)
    if aux and (refusal := aux_loss_refusal(model)):
        raise InputError(
            f"{setting}, but {family} {refusal}; set moe.aux_loss_coef to 0.0", key="moe.aux-loss-unsupported"
        )
    if aux and moe.router == "frozen":
        raise InputError(
            f"{setting}, but moe.router is frozen, so the loss would move everything except what chooses experts; set "
            "moe.aux_loss_coef to 0.0 or moe.router to train",
            key="moe.aux-loss-of-frozen-router",
        )
    if moe.z_loss_coef and (refusal := router_logits_refusal(model)):
        raise no_router_logits(model, f"moe.z_loss_coef is {moe.z_loss_coef}", refusal)
    biases = tuple(_biases(model, anatomy, moe.bias_update_rate)) if moe.bias_update_rate else ()
    top_k = getattr(model, "num_experts_per_tok", None) or anatomy.experts[0].top_k or 0
    if aux and not top_k:
        raise InputError(
            f"{setting}, but {family} does not say how many experts a token gets; set it to 0.0",
            key="moe.aux-loss-unsupported",
        )
    asked_for = bool(moe.z_loss_coef or (aux and moe.aux_loss_coef != "from_model"))
    return Balance(aux, moe.z_loss_coef, moe.bias_update_rate, anatomy.num_experts, top_k, biases, asked_for)


def no_router_logits(model: nn.Module, setting: str, why: str) -> InputError:
    """Return the error for a router loss of a model that does not give the logits it is computed from."""
    family = model.config.model_type  # type: ignore[union-attr]
    return InputError(
        f"{setting}, but {family} {why}; set moe.z_loss_coef and moe.aux_loss_coef to 0.0", key="moe.no-router-logits"
    )


def attached_balance(model: nn.Module) -> Balance:
    """Return what `parallelize` attached; a model that was never parallelized is not balanced."""
    plan = sharded(model).shard_plan
    return Balance() if plan is None else plan.balance


def count_for_biases(model: nn.Module, balance: Balance) -> None:
    """Let the layers here whose biases move count the tokens of a step."""
    for experts in stage_names(model, [experts for experts, _ in balance.biases]):
        layer_of(model.get_submodule(experts)).step_tokens_per_expert = TokensPerExpert()


def update_router_bias(model: nn.Module, *, skipped: bool = False) -> None:
    """Move the correction biases by `moe.bias_update_rate` towards balance. Call it once after each optimizer step.

    Counts are those of all training forwards since the last call, over all ranks, without padding. Every rank gets the
    same biases, bit for bit. With a rate of 0 it does nothing.

    Args:
        skipped: The optimizer did not step: drop the counts and move nothing.

    Collectives: every rank calls it; one all-reduce of `[L, E]` int64.
    """
    balance = attached_balance(model)
    if not balance.biases:
        return
    here = set(stage_names(model, [experts for experts, _ in balance.biases]))
    counters = [
        layer_of(model.get_submodule(experts)).step_tokens_per_expert if experts in here else None
        for experts, _ in balance.biases
    ]
    counts = [None if counter is None else counter.pop() for counter in counters]
    if skipped:
        return
    nothing_E = torch.zeros(balance.num_experts, dtype=torch.int64, device=mesh_of(model).device)
    count_LE = torch.stack([nothing_E if count_E is None else count_E for count_E in counts])
    dist.all_reduce(count_LE)
    # Compare in integers: the sign is exact, so that every rank moves its biases equally.
    direction_LE = (count_LE.sum(dim=1, keepdim=True) - balance.num_experts * count_LE).sign()
    for (experts, name), direction_E in zip(balance.biases, direction_LE, strict=True):
        if experts not in here:
            continue  # of another pipeline stage
        bias = attrgetter(name)(model)
        step = (balance.bias_update_rate * direction_E).to(bias.dtype).view(bias.shape)
        # A buffer, or this rank's part of a parameter that FSDP2 has sharded.
        local_tensor(bias).add_(cut_local(bias, step))


def _aux_loss_coef(model: nn.Module, moe: MoeConfig) -> tuple[float, str]:
    """Return the factor of the auxiliary loss, and the start of a sentence that names its source."""
    if moe.aux_loss_coef != "from_model":
        return moe.aux_loss_coef, f"moe.aux_loss_coef is {moe.aux_loss_coef}"
    config: Any = model.config
    text = config.get_text_config()
    coefficient = 0.0
    if getattr(text, "output_router_logits", False):  # without it the family's own code adds no loss
        places = ((model, "router_aux_loss_coef"), (text, "router_aux_loss_coef"), (model, "aux_loss_coef"))
        values = (getattr(place, name, None) for place, name in places)
        coefficient = next((float(value) for value in values if value is not None), 0.0)
    return coefficient, f"moe.aux_loss_coef: from_model means {coefficient} for this model"


def _biases(model: nn.Module, anatomy: Anatomy, rate: float) -> Iterator[tuple[str, str]]:
    """Return the bias beside each experts module; hash-routed layers of a family with biases have none."""
    setting = f"moe.bias_update_rate is {rate}"
    found: list[tuple[str, str]] = []
    for spec in anatomy.experts:
        # In the router of the MoE block around the experts, or beside it.
        parent = spec.name.rpartition(".")[0]
        state = model.get_submodule(parent).state_dict(keep_vars=True)
        named = {name: tensor for name, tensor in state.items() if name.rpartition(".")[2] in _BIAS_NAMES}
        fitting = [n for n, each in named.items() if each.numel() == spec.num_experts and not each.requires_grad]
        found += [(spec.name, f"{parent}.{name}") for name in fitting if len(fitting) == 1]
    if not found:
        raise InputError(
            f"{setting}, but the routers of {model.config.model_type} have no correction bias "  # type: ignore[union-attr]
            f"({' or '.join(_BIAS_NAMES)}, one number per expert); set moe.bias_update_rate to 0.0",
            key="moe.no-router-bias",
        )
    if any(is_adapter(name) for name, _ in model.named_parameters()):
        raise InputError(
            f"{setting}, but an adapter does not hold the biases; set moe.bias_update_rate to 0.0 with lora",
            key="moe.router-bias-with-lora",
        )
    for experts, name in found:
        if isinstance(model.get_submodule(experts), FusedExperts):
            raise InputError(
                f"{setting}, but {experts} is a list of modules, to which the model's own code gives padding as well, "
                "so that their load is not known; set moe.bias_update_rate to 0.0",
                key="moe.router-bias-of-list",
            )
        dtype = attrgetter(name)(model).dtype
        if dtype not in (torch.float32, torch.float64):
            raise InputError(
                f"{setting}, but {name} is {dtype}, where small steps are lost; set precision.params to float32",
                key="moe.router-bias-dtype",
            )
        yield experts, name


def chosen_pairs(logits_TE: torch.Tensor, top_k: int, real_T: torch.Tensor) -> torch.Tensor:
    """Count the real tokens whose softmax has expert e among its `top_k`, int64 `[E]`."""
    index_TK = torch.softmax(logits_TE.detach(), dim=-1).topk(top_k, dim=-1).indices
    return count_pairs(index_TK, logits_TE.shape[-1], real_T)


def probability_sums(logits_TE: torch.Tensor, real_T: torch.Tensor) -> torch.Tensor:
    """Sum the softmax of the logits over real tokens, `[E]`, in fp32 (fp64 for fp64 logits)."""
    probability_TE = _wide(torch.softmax(logits_TE, dim=-1))
    return real_T.to(probability_TE.dtype) @ probability_TE


def squared_logsumexp(logits_TE: torch.Tensor, real_T: torch.Tensor) -> torch.Tensor:
    """Return the z-loss's sum over real tokens, 0-dim."""
    size_T = torch.logsumexp(_wide(logits_TE), dim=-1)
    return (size_T.square() * real_T.to(size_T.dtype)).sum()


def load_balancing_loss(
    logits: Sequence[torch.Tensor], num_experts: int, top_k: int, real_T: torch.Tensor
) -> torch.Tensor:
    """Return the loss of one batch in one process: the sum of the shares of all ranks and micro-batches."""
    pairs_E = sum(chosen_pairs(logits_TE, top_k, real_T) for logits_TE in logits)
    probability_E = sum(probability_sums(logits_TE, real_T) for logits_TE in logits)
    rows = len(logits) * real_T.sum()
    return num_experts * ((pairs_E / rows) * (probability_E / rows)).sum()


def aux_loss_refusal(model: nn.Module) -> str | None:
    """Return why the load-balancing loss would differ from the one that transformers gives `model`; None if it does
    not.
    """
    # In the file of the model's class; FSDP2 puts a class of its own in front.
    modules = (sys.modules.get(kind.__module__) for kind in type(model).__mro__)
    loss = next((f for module in modules if (f := getattr(module, "load_balancing_loss_func", None))), None)
    if loss is None:
        return "has no load-balancing loss in transformers"
    if not _is_standard(loss):
        return "has a load-balancing loss of another form in transformers"
    return router_logits_refusal(model)


def router_logits_refusal(model: nn.Module) -> str | None:
    """Return why transformers cannot return the router logits of `model`, or None if it can."""
    parts = (module for module in model.modules() if isinstance(module, PreTrainedModel))
    if any("router_logits" in declared(part, "_can_record_outputs") for part in parts):
        return None
    return "does not hand out router logits"


def _is_standard(loss: Callable[..., Any]) -> bool:
    """Return whether the function gives our values on logits of two layers, with padding and without."""
    generator = torch.Generator().manual_seed(0)
    logits = tuple(torch.randn(6, 5, generator=generator) for _ in range(2))
    mask_BS = torch.tensor([[1, 1, 1], [1, 0, 0]])
    for mask, real_T in ((mask_BS, mask_BS.flatten().bool()), (None, torch.ones(6, dtype=torch.bool))):
        try:
            value = loss(logits, 5, 2, mask)
        except (TypeError, ValueError, RuntimeError):  # it takes something else
            return False
        if not torch.allclose(torch.as_tensor(value), load_balancing_loss(logits, 5, 2, real_T)):
            return False
    return True


def _wide(values: torch.Tensor) -> torch.Tensor:
    # Sums over a step's tokens lose too much in bf16.
    return values if values.dtype == torch.float64 else values.float()
