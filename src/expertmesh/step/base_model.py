"""Run a model through its root, with its head on no token: the loss and the counting of routing both need this.

FSDP2's hooks are on the root module, so the base model beside the head is never called alone.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils.generic import ModelOutput

from expertmesh.anatomy import head_of, is_classifier
from expertmesh.compat import child_slots
from expertmesh.config.errors import InputError
from expertmesh.experts.lora_state import number_rows
from expertmesh.experts.micro_batch import counting, real_tokens_of
from expertmesh.parallel.sequence import OF_ROWS, SequenceShare, sequence_share
from expertmesh.state.patching import exchanged

_NOT_FOR_THE_MODEL = ("labels", "real_tokens", *OF_ROWS)


def run_base(
    model: nn.Module, batch: Mapping[str, torch.Tensor], *, router_logits: bool = False
) -> tuple[ModelOutput, torch.Tensor, tuple[torch.Tensor, ...]]:
    """Run the base model on a micro-batch.

    The model never computes a router loss by itself: that loss would be of this process, not of the global batch.

    Args:
        batch: The full, padded micro-batch, on every rank along cp and tp.
        router_logits: Also record the router logits.

    Returns:
        The base model's output, the root's logits of no token (zeros of a classifier), and the router logits of each
        MoE layer that runs as transformers records them, `[B * S, E]` (empty without `router_logits`). Under cp and tp,
        S counts this rank's positions (sequence.py).

    Raises:
        InputError: A classifier whose config has no padding token gets several rows.

    Collectives: every rank calls it; those of the model's forward.
    """
    captured: list[ModelOutput] = []
    recorded: list[tuple[torch.Tensor, ...]] = []
    config: Any = model.config
    # With output_router_logits in its config the model would add its own loss: the argument overrides it.
    overrides = router_logits or getattr(config.get_text_config(), "output_router_logits", False)

    def pass_no_token_to_head(module: nn.Module, args: Any, output: ModelOutput) -> ModelOutput:
        recorded.append(tuple(output.get("router_logits") or ()))
        captured.append(type(output)(**{key: value for key, value in output.items() if key != "router_logits"}))
        # A slice of no position keeps the head in the forward, with its FSDP2 hooks, for no logits.
        return type(output)(**{**captured[0], "last_hidden_state": captured[0]["last_hidden_state"][:, :0]})

    classifies = is_classifier(model)
    if classifies:
        _refuse_unpadded(model, batch)
    share = sequence_share(model)
    number_rows(model, batch.get("row_numbers"), batch["input_ids"].shape[1], partial(share.local, dim=1))
    base = model.get_submodule(base_name(model))
    hooks = [base.register_forward_hook(pass_no_token_to_head)]
    if overrides:
        given = {"output_router_logits": router_logits}
        hooks.append(base.register_forward_pre_hook(lambda _, args, kwargs: (args, kwargs | given), with_kwargs=True))
    try:
        nothing = {"score": _NoLogits(batch["input_ids"].shape[1], config.num_labels)} if classifies else {}
        with counting(real_tokens_here(batch, share)), exchanged(child_slots(model), nothing):
            # A cache would keep keys and values of every layer alive until backward.
            output = model(**model_inputs(batch), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    assert len(captured) == 1, f"{type(model).__name__} ran its base model {len(captured)} times"
    elsewhere = f"{type(model).__name__} computed logits from elsewhere than its base model"
    assert classifies or output.logits.shape[1] == 0, elsewhere
    return captured[0], output.logits, recorded[0]


def model_inputs(batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the entries of a micro-batch that the model's forward takes."""
    return {key: value for key, value in batch.items() if key not in _NOT_FOR_THE_MODEL}


def real_tokens_here(batch: Mapping[str, torch.Tensor], share: SequenceShare) -> torch.Tensor | None:
    """Return a mask of this rank's positions that are not padding, `[B, S]` bool; None if all are real."""
    real_BS = real_tokens_of(batch)
    return None if real_BS is None else share.local(real_BS, 1)


def base_name(model: nn.Module) -> str:
    """Return the name of the base model beside the head: the family's prefix, else the only model there.

    A model with a vision tower may contain a full causal language model; the result is then the base of that one.
    """
    head = head_of(model)
    around = (name for name, module in model.named_modules() if any(child is head for child in module.children()))
    parent = "" if head is None else next(around, "")
    causal = model.get_submodule(parent)
    prefix = getattr(causal, "base_model_prefix", "")
    models = [name for name, child in causal.named_children() if isinstance(child, PreTrainedModel)]
    names = [prefix] if prefix in child_slots(causal) else models
    if len(names) != 1:
        raise InputError(
            f"{type(model).__name__} has no base model under a head; only causal language models train",
            key="model.no-base-model",
        )
    return f"{parent}.{names[0]}" if parent else names[0]


class _NoLogits(nn.Module):
    """A classifier's head on no token: zeros for `length` positions, of which the model picks one of each row."""

    def __init__(self, length: int, labels: int) -> None:
        super().__init__()
        self.length, self.labels = length, labels

    def forward(self, hidden_B0H: torch.Tensor) -> torch.Tensor:
        return hidden_B0H.sum().expand(len(hidden_B0H), self.length, self.labels)


def _refuse_unpadded(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> None:
    """Raise `InputError` for several rows if the class cannot tell padding, after which nothing is read."""
    if padding_of(model) is None and len(batch["input_ids"]) > 1:
        raise InputError(
            f"{type(model).__name__} reads each row at its last token that is not padding, and config.pad_token_id is "
            "None; set it: model.config.get_text_config().pad_token_id = tokenizer.pad_token_id",
            key="model.no-padding-token",
        )


def padding_of(model: nn.Module) -> int | None:
    """Return the token that a classifier takes for padding."""
    config: Any = model.config
    pad: int | None = config.get_text_config().pad_token_id
    return pad
