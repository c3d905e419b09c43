"""Callbacks on weights in shards: averages are right, a number of one rank's shards stops, the libraries' are known."""

import inspect
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers.integrations.integration_utils
import transformers.trainer_callback
import transformers.trainer_jit_checkpoint
import trl.trainer.callbacks
from datasets import Dataset
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback
from trl import BEMACallback, LogCompletionsCallback

import expertmesh as em
from expertmesh.integrations import refusals
from tests.integrations.support import ONE_LAYER, Job, accumulating, build, sharded, stock
from tests.support.errors import refused, refused_on_ranks
from tests.support.ranks import shared_ranks

MODULES = (
    transformers.integrations.integration_utils,
    transformers.trainer_callback,
    transformers.trainer_jit_checkpoint,
    trl.trainer.callbacks,
)
# They log, stop, or send what lies on disk, and read no weights.
HARMLESS = {
    *("TrainerCallback", "CallbackHandler", "DefaultFlowCallback", "ProgressCallback", "PrinterCallback"),
    *("EarlyStoppingCallback", "RichProgressCallback", "TensorBoardCallback", "TrackioCallback", "CometCallback"),
    *("AzureMLCallback", "MLflowCallback", "DagsHubCallback", "NeptuneCallback", "CodeCarbonCallback"),
    *("ClearMLCallback", "FlyteCallback", "SwanLabCallback", "KubeflowCallback"),
}


def test_every_callback_of_the_libraries_is_known() -> None:
    found = {
        name
        for module in MODULES
        for name, kind in inspect.getmembers(module, inspect.isclass)
        if issubclass(kind, TrainerCallback)
    }
    depends = {*refusals._VARIABLES, *refusals._GENERATING}
    assert found == {*HARMLESS, *refusals.REFUSED_CALLBACKS, *depends}


class _Average(TrainerCallback):  # type: ignore[misc]
    """An average of weights and their norms, as people write them."""

    def __init__(self) -> None:
        self.average: dict[str, torch.Tensor] = {}
        self.norms: list[float] = []

    def on_train_begin(self, *args: Any, model: Any = None, **kwargs: Any) -> None:
        self.average = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    @torch.no_grad()
    def on_step_end(self, *args: Any, model: Any = None, **kwargs: Any) -> None:
        for name, parameter in model.named_parameters():
            self.average[name].mul_(0.9).add_(parameter, alpha=0.1)
        self.norms += [float(_whole(parameter).norm()) for parameter in model.parameters()]

    @torch.no_grad()
    def on_train_end(self, *args: Any, model: Any = None, **kwargs: Any) -> None:
        for name, parameter in model.named_parameters():
            parameter.copy_(self.average[name])


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _norms(trainer: Any) -> list[float]:
    return next(each.norms for each in trainer.callback_handler.callbacks if isinstance(each, _Average))


@pytest.mark.slow(why="launches; one number stays, and that each callback is known")
def test_an_average_of_weights_is_the_one_of_the_stock_trainer(tmp_path: Path) -> None:
    job = Job(tmp_path, given={"callbacks": [_Average()]}, changes=ONE_LAYER, after=_norms)
    ours, theirs = sharded(job, 2, ep=2), stock(accumulating(job, 2))
    assert ours.extra == pytest.approx(theirs.extra, rel=1e-5)
    for name, average in theirs.weights.items():
        torch.testing.assert_close(ours.weights[name], average, rtol=0, atol=2e-6)


class _Reads(TrainerCallback):  # type: ignore[misc]
    def __init__(self, reads: Any) -> None:
        self.reads = reads

    def on_step_end(self, *args: Any, model: Any = None, **kwargs: Any) -> None:
        self.reads({name: parameter.detach() for name, parameter in model.named_parameters()})


HEAD, EXPERTS = "lm_head.weight", "model.layers.0.mlp.experts.down_proj"
READS = {
    "a norm": lambda weights: weights[HEAD].norm().item(),
    "a mean": lambda weights: float(weights[EXPERTS].abs().mean()),
    "a maximum": lambda weights: int(weights[HEAD].max()),
    "a sum of all": lambda weights: sum(weight.pow(2).sum() for weight in weights.values()),
    "a whole copy": lambda weights: torch.zeros(weights[HEAD].shape).copy_(weights[HEAD]),
}


@pytest.mark.slow_cases(
    r"a mean|a maximum|a sum of all|a whole copy", why="launches; one number stays, and that each callback is known"
)
@pytest.mark.parametrize("reads", READS)
def test_a_number_of_one_ranks_shards_stops_the_callback(reads: str, tmp_path: Path) -> None:
    job = Job(tmp_path, args={"max_steps": 1}, given={"callbacks": [_Reads(READS[reads])]})
    with refused_on_ranks("trainer.unsupported-callback", naming="full_tensor()"):
        sharded(job, 2, ep=2)


def _adds_it_later(output: str) -> None:
    trainer = build(Job(Path(output)), em.ParallelConfig(ep=2))
    trainer.add_callback(BEMACallback())
    trainer.train()


@pytest.mark.slow(why="launches; one number stays, and that each callback is known")
def test_a_callback_that_is_added_later_is_refused_before_training(tmp_path: Path) -> None:
    with refused_on_ranks("trainer.unsupported-callback", naming="BEMACallback"):
        shared_ranks(_adds_it_later, 2, str(tmp_path))


def test_prompts_that_ranks_would_generate_for_in_different_numbers() -> None:
    trainer: Any = types.SimpleNamespace(eval_dataset=Dataset.from_list([{"prompt": "a"}] * 3))
    with refused("trainer.unsupported-callback", naming="num_prompts"):
        refusals.refuse_callbacks([LogCompletionsCallback(trainer)], ranks=2)
    refusals.refuse_callbacks([LogCompletionsCallback(trainer, num_prompts=2)], ranks=2)
