"""`em.trainer(GRPOTrainer)`: completions that ranks generate in lockstep, rewards and losses are the stock trainer's.

Under DDP on as many ranks, where each samples by random numbers of its own. Completions end at very different lengths.
"""

import functools
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import GRPOTrainer
from trl.generation import vllm_generation
from trl.models import unwrap_model_for_generation

import expertmesh as em
from expertmesh.integrations import refusals
from tests.integrations.support import ONE_LAYER, Job, compare, sharded, stock, tokenizer
from tests.integrations.test_dpo import pairs
from tests.support.models import tiny_model

LOGGED = ("loss", "reward", "reward_std", "entropy", "completions/mean_length", "completions/min_length")


def prompts() -> list[dict[str, str]]:
    return [{"prompt": row["prompt"].strip()} for row in pairs()]


def reward_of_length(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    """Depends on every token."""
    return [sum(position * token for position, token in enumerate(ids, 1)) % 11 / 10 for ids in completion_ids]


def ends_often() -> Any:
    """A model whose completions end at very different lengths: the end of a text is likely."""
    model: Any = tiny_model("qwen3_moe", **ONE_LAYER)
    with torch.no_grad():
        model.lm_head.weight[1] *= 8
    return model


def _job(tmp_path: Path, args: dict[str, Any], **given: Any) -> Job:
    ends_often().save_pretrained(tmp_path / "base")
    own = {"per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 16, "max_steps": 3}
    given = {"reward_funcs": reward_of_length, **given}
    return Job(
        tmp_path, kind=GRPOTrainer, args={**own, **args}, given=given, rows=prompts, model=str(tmp_path / "base")
    )


@pytest.mark.slow(why="test_sft.py stays, and the planted bug here")
@pytest.mark.parametrize(
    "args",
    [
        pytest.param({"num_iterations": 2}, id="two iterations"),
        pytest.param({"beta": 0.1, "gradient_accumulation_steps": 2}, id="with a reference"),
        pytest.param({"gradient_checkpointing": True, "loss_type": "grpo"}, id="checkpointed"),
    ],
)
def test_completions_rewards_and_steps_are_the_stock_trainers(args: dict[str, Any], tmp_path: Path) -> None:
    job = _job(tmp_path, args)
    expected = replace(job, args={key: value for key, value in job.args.items() if key != "gradient_checkpointing"})
    ours, theirs = sharded(job, 2, ep=2), stock(expected, 2)
    assert min(theirs.series("completions/min_length")) < 16
    # Advantages of a group add up to zero, and so do the terms of the first losses: 1e-6 is 1e-5 of the terms.
    compare(ours, theirs, keys=LOGGED, absolute=1e-6)
    assert ours.series("kl") == pytest.approx(theirs.series("kl"), rel=1e-3, abs=1e-6)


class _CallsTools(PreTrainedTokenizerFast):  # type: ignore[misc]
    """A tokenizer of whose model's completions some call a tool, once or several times, by their tokens."""

    def parse_response(self, response: Any, **kwargs: Any) -> dict[str, Any]:
        call = {"type": "function", "function": {"name": "look_up", "arguments": {"word": "w7"}}}
        return {"role": "assistant", "content": self.decode(response)} | (
            {"tool_calls": [call]} if sum(response) % 5 < 2 else {}
        )


def _calls_tools() -> Any:
    words = tokenizer()
    found = _CallsTools(
        tokenizer_object=words.backend_tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    found.response_template = {}
    found.chat_template = (
        "{% for message in messages %}{{ message.role }} {{ message.content }} "
        "{% for call in message.tool_calls or [] %}{{ call.function.name }} "
        "{{ call.function.arguments }} {% endfor %}<eos> {% endfor %}"
        "{% if add_generation_prompt %}assistant {% endif %}"
    )
    return found


def look_up(word: str) -> str:
    """Looks up a word.

    Args:
        word: The word.
    """
    return f"{word} w9 w9"


class _Environment:
    """Whose one method is a tool."""

    def reset(self, **kwargs: Any) -> None: ...

    def look_up(self, word: str) -> str:
        """Looks up a word.

        Args:
            word: The word.
        """
        return look_up(word)


def _rollout(prompts: list[Any], trainer: Any) -> dict[str, Any]:
    """Calls the model as often as a rank likes: for each prompt once, and again for those whose completion is odd."""
    found: dict[str, list[Any]] = {"prompt_ids": [], "completion_ids": [], "logprobs": []}
    for prompt in prompts:
        ids, completion = trainer.processing_class(prompt)["input_ids"], [3]
        while completion[-1] % 2 and len(completion) < 13:
            entered = torch.tensor([ids + completion])
            with torch.no_grad(), unwrap_model_for_generation(trainer.model_wrapped, trainer.accelerator) as model:
                completion = model.generate(entered, max_new_tokens=4, do_sample=True)[0, len(ids) :].tolist()
        found["prompt_ids"].append(ids)
        found["completion_ids"].append(completion)
        found["logprobs"].append([0.0] * len(completion))
    return found


CALLS: dict[str, dict[str, Any]] = {
    "tools": {"tools": [look_up]},
    "environment_factory": {"environment_factory": _Environment},
    "rollout_func": {"rollout_func": _rollout},
}


@pytest.mark.slow(why="test_sft.py stays, and the planted bug here")
@pytest.mark.parametrize("calls", CALLS)
def test_ranks_that_generate_in_different_numbers_do_as_the_stock_trainer(calls: str, tmp_path: Path) -> None:
    given = CALLS[calls]
    if calls != "rollout_func":
        rows = [{"prompt": [{"role": "user", "content": row["prompt"]}]} for row in prompts()]
        given = {**given, "processing_class": _calls_tools(), "train_dataset": Dataset.from_list(rows)}
    job = _job(tmp_path, {"max_completion_length": 24, "max_tool_calling_iterations": 3}, **given)
    theirs = stock(job, 2)
    assert calls == "rollout_func" or min(theirs.series("tools/call_frequency")) > 0
    compare(sharded(job, 2, ep=2), theirs, keys=(*LOGGED, "tools/call_frequency"), absolute=1e-6)


class _Server:
    """A stand-in for vLLM's server: an unsharded model that has nothing but the weights that it was sent."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.model, self.calls = directory, None, 0

    def get_server_info(self) -> Any:
        return {"model_config": {"logprobs_mode": "processed_logprobs"}}

    def update_named_params(self, metadata: list[Any], named: Any) -> None:
        sent = {name: tensor.detach().clone() for name, tensor in named}
        told = [(name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for name, tensor in sent.items()]
        assert told == metadata
        self.directory.mkdir(exist_ok=True)
        save_file(sent, self.directory / "model.safetensors", {"format": "pt"})
        self.model, about = AutoModelForCausalLM.from_pretrained(self.directory, output_loading_info=True)
        assert not about["missing_keys"]
        assert not about["unexpected_keys"]

    def reset_prefix_cache(self) -> None: ...

    def generate(self, prompts: list[list[int]], n: int, max_tokens: int, **options: Any) -> dict[str, Any]:
        self.calls += 1
        model: Any = self.model
        completions = []
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.calls)
            for prompt in prompts:
                options = {"do_sample": True, "max_new_tokens": max_tokens, "pad_token_id": 0, "eos_token_id": 1}
                rows = model.generate(torch.tensor([prompt] * n), **options)[:, len(prompt) :].tolist()
                completions += [row[: row.index(1) + 1] if 1 in row else row for row in rows]
        logprobs = [[[0.0] for _ in ids] for ids in completions]
        return {"prompt_ids": prompts, "completion_ids": completions, "logprobs": logprobs}


def _through_a_server(job: Job, monkeypatch: pytest.MonkeyPatch) -> Job:
    """The job with completions of a `_Server`, of which the first rank is the client."""
    shutil.copytree(job.model or "", job.output / "served", dirs_exist_ok=True)
    (job.output / "served" / "model.safetensors").unlink()

    def init(generation: Any) -> None:
        generation.vllm_client = _Server(job.output / "served")

    monkeypatch.setattr(vllm_generation.VLLMGeneration, "_init_vllm", init)
    monkeypatch.setattr(refusals, "_has_vllm", lambda: True)
    own = {"use_vllm": True, "vllm_mode": "server", "vllm_importance_sampling_correction": False}
    return replace(job, args={**job.args, **own})


@pytest.mark.slow(why="test_sft.py stays, and the planted bug here")
def test_weights_reach_vllm_by_the_names_of_the_files_before_each_generation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = _through_a_server(_job(tmp_path, {}), monkeypatch)
    compare(sharded(job, 2, ep=2), stock(job, 2), keys=LOGGED, absolute=1e-6)


def test_experts_that_reach_vllm_by_each_others_names_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, names = em.iter_hf_weights, {".experts.0.": ".experts.1.", ".experts.1.": ".experts.0."}

    def exchanged(model: Any) -> Any:
        for name, tensor in real(model):
            here = next((part for part in names if part in name), None)
            yield name if here is None else name.replace(here, names[here]), tensor

    monkeypatch.setattr(em, "iter_hf_weights", exchanged, raising=False)
    job = _through_a_server(_job(tmp_path, {"max_steps": 1}), monkeypatch)
    with pytest.raises(AssertionError):
        compare(sharded(job, 2, ep=2), stock(job, 2), keys=LOGGED, absolute=1e-6)


@pytest.mark.slow(why="test_sft.py stays, and the planted bug here")
def test_adapters_are_merged_on_their_way_to_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The completions change once adapters have been trained."""
    job = _through_a_server(_job(tmp_path, {"learning_rate": 1e-2}, lora=em.LoraConfig(r=4)), monkeypatch)
    ours = sharded(job, 2, ep=2)
    monkeypatch.setattr(em, "iter_hf_weights", functools.partial(em.iter_hf_weights, merge=False), raising=False)
    base = sharded(job, 2, ep=2)
    assert ours.series("reward")[0] == base.series("reward")[0]
    assert ours.series("entropy")[-1] != base.series("entropy")[-1]


@pytest.mark.slow(why="test_sft.py stays, and the planted bug here")
def test_adapters_off_are_the_reference(tmp_path: Path) -> None:
    """Adapters start at the base, so that there is no divergence before the first step and some after it."""
    lora = em.LoraConfig(r=4, targets=["attention", "experts"])
    result = sharded(_job(tmp_path, {"beta": 0.1}, lora=lora), 2, ep=2)
    first, *others = result.series("kl")
    assert first == pytest.approx(0.0, abs=1e-7)
    assert all(kl > 1e-7 for kl in others)
