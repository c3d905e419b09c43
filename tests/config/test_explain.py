"""The sentences about unknown, missing and mistyped keys."""

import time
from pathlib import Path
from typing import Any, get_args

import pytest

from expertmesh.config import Config, DataSource, InputError, load_config
from expertmesh.config.base import Section
from expertmesh.config.explain import DERIVED, ELSEWHERE, NOT_YET, THEIRS
from tests.config.minimal import write


def refusal(path: Path, *overrides: str) -> str:
    with pytest.raises(InputError) as caught:
        load_config(path, overrides)
    return str(caught.value)


@pytest.mark.parametrize(
    ("key", "advice"),
    [
        ("trian", "did you mean train?"),
        ("train.max_step", "did you mean train.max_steps?"),
        ("train.max-steps", "did you mean train.max_steps?"),
        ("data.train.0.fromat", "did you mean data.train.0.format?"),
        ("learning_rate", "it belongs under optim"),
        ("train.warmup_ratio", "it belongs under schedule"),
        (
            "train.name",
            "it belongs under data.train.0 or under data.eval.0 or under objective or under optim or under schedule",
        ),
        ("data.path", "it belongs under data.train.0 or under data.eval.0"),
        ("model.output_dir", "it belongs at the top level"),
        ("lr", "did you mean optim.learning_rate?"),
        ("train.learning_rte", "did you mean optim.learning_rate?"),
        (
            "train.gradient_accumulation_steps",
            "it follows from train.global_batch_size, train.micro_batch_size",
        ),
        ("parallel.efsdp", "it follows from parallel.fsdp and parallel.ep; remove it"),
        ("lora.lora_alpha", "did you mean lora.alpha?"),
        ("load_in_4bit", "did you mean precision.frozen: nf4?"),
        ("train.per-device-train-batch-size", "did you mean train.micro_batch_size?"),
        ("deepspeed", "it follows from section parallel, as FSDP2 shards every model; remove it"),
        ("lora.use_dora", "DoRA is not in expertmesh yet; remove it"),
        ("schedule.zzz", "the keys here are name, warmup_ratio, warmup_steps, min_ratio, decay_ratio"),
    ],
)
def test_an_unknown_key_is_answered_with_the_one_that_was_meant(tmp_path: Path, key: str, advice: str) -> None:
    message = refusal(write(tmp_path), f"{key}=1")
    assert message.startswith(f"override '{key}=1': {key} is not a key of the configuration; {advice}")


def test_names_of_other_trainers_lead_to_keys_that_exist() -> None:
    keys: set[str] = set()
    unread: list[tuple[tuple[str, ...], Any]] = [((), Config)]
    while unread:
        path, section = unread.pop()
        for name, field in section.model_fields.items():
            keys.add(".".join((*path, name)))
            kinds = (field.annotation, *get_args(field.annotation))
            unread += [((*path, name), kind) for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)]
    keys |= {f"data.train.0.{name}" for name in DataSource.model_fields}
    ours = {target.partition(":")[0] for target in ELSEWHERE.values()}
    assert ours - keys == set()
    assert len(ELSEWHERE) > 60
    own = {key.rpartition(".")[2] for key in keys}
    assert own & {*ELSEWHERE, *DERIVED, *NOT_YET} == set()
    assert len({*ELSEWHERE, *DERIVED, *NOT_YET}) == len(ELSEWHERE) + len(DERIVED) + len(NOT_YET)
    assert sum(map(len, (names.split() for names in THEIRS.values()))) == len(ELSEWHERE)


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("parallel.ep=many", "parallel.ep must be an integer of at least 1 or auto, not 'many'"),
        ("moe.aux_loss_coef=many", "moe.aux_loss_coef must be a number of at least 0 or from_model, not 'many'"),
        ("optim.max_grad_norm=-1", "optim.max_grad_norm must be a number above 0 or null, not -1"),
        (
            "schedule.name=cosin",
            "schedule.name must be one of cosine, linear, constant, wsd, inverse_sqrt, not 'cosin'",
        ),
        (
            "model.revision=1e5",
            "model.revision must be text or null, not the number 100000.0; put it in quotes",
        ),
        ("schedule=[]", "schedule must be a section of keys (name, warmup_ratio, "),
        (
            "data.train=[]",
            "data.train must be a list of one or more items, each a section of keys (path, format, "
            "columns, roles, weight, repeat, max_rows, name) or text that is not empty, not []",
        ),
        (
            "optim.betas=[1, 2, 3]",
            "optim.betas must be a list of 2 values, each a number of at least 0 and below 1, not [1, ",
        ),
        ("optim.betas=[0, 1]", "optim.betas.1 must be a number of at least 0 and below 1, not 1"),
        ("precision.compute=fp16", "precision.compute is 'fp16', but float16 needs loss scaling"),
    ],
)
def test_a_wrong_value_is_answered_with_what_the_key_accepts(tmp_path: Path, override: str, sentence: str) -> None:
    assert refusal(write(tmp_path), override).startswith(f"override {override!r}: {sentence}")


def test_missing_keys_are_named_in_full(tmp_path: Path) -> None:
    path = write(tmp_path, base="data: {train: [{format: text}]}\n")
    assert refusal(path).splitlines() == [
        f"{path}: model.name_or_path is missing; add it",
        f"{path}:1: data.train.0.path is missing; add it",
        f"{path}: output_dir is missing; add it",
    ]


def test_a_list_with_a_bad_item_is_not_also_called_too_short(tmp_path: Path) -> None:
    assert refusal(write(tmp_path), "data.train=[3]") == (
        "override 'data.train=[3]': data.train.0 must be a section of keys (path, format, columns, roles, "
        "weight, repeat, max_rows, name), not 3"
    )


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ('data.train=""', "data.train.0.path must be text that is not empty, not ''"),
        ("data.train=3", "data.train must be a list of one or more items, each a section of keys (path, "),
        ("log.report_to=wanb", "log.report_to.0 must be one of jsonl, tensorboard, wandb, trackio, mlflow, not 'wanb'"),
        ("lora.targets=[]", "lora.targets must be a list of one or more items, each text that is not empty, not []"),
        ("lora.targets=3", "lora.targets must be a list of one or more items, each text that is not empty, not 3"),
        ("train.checkpoint_layers=al", "train.checkpoint_layers must be all or an integer of at least 2 or a list of "),
    ],
)
def test_a_wrong_value_of_a_list_that_text_may_stand_for(tmp_path: Path, override: str, sentence: str) -> None:
    assert refusal(write(tmp_path), override).startswith(f"override {override!r}: {sentence}")


def test_a_long_value_is_shown_cut(tmp_path: Path) -> None:
    assert len(refusal(write(tmp_path), f"schedule.name={'x' * 5000}").partition("': ")[2]) < 200


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("train.num_epochs=1000000000", "must be an integer of at least 1 and of at most 1,000,000, not 1000000000"),
        ("train.global_batch_size=1000000000000000000", "of at most 16,777,216, not"),
        ("parallel.fsdp=1000000000000", "of at most 1,048,576 or auto, not"),
        ("parallel={fsdp: 1000000, tp: 1000000, ep: 3}", "are 1,000,000,000,000 ranks, more than 1,048,576"),
        (f"distributed.timeout_seconds=1{'0' * 30}", "of at most 31,622,400, not"),
        ("lora.r=1000000000000000000", "of at most 65,536, not"),
        ("lora.alpha=1e308", "of at most 1e+06, not"),
        ("optim.learning_rate=1e999", "optim.learning_rate must be a number above 0, not inf"),
        (f"optim.learning_rate=1{'0' * 5000}", "optim.learning_rate must be"),
        (f"model.name_or_path={'a' * 5000}", "a name has at most 255 bytes"),
        ('model.name_or_path="a\\0b"', "a name has no control characters"),
        ('output_dir="\\ud800"', ""),
        ("output_dir=~nouser/runs", "there is no such user"),
        ("data.train.²=x", "data.train is a list of 1"),
        ("data.train.0.path=~nouser/x", "there is no such user"),
        ("data.template_args=" + "[" * 100_000, "nested too deeply"),
        ("data.template_args=" + "{" * 100 + "}" * 100, "nested too deeply"),
    ],
    ids=lambda text: text[:50],
)
def test_values_that_cannot_be_are_refused_in_a_sentence_and_at_once(
    tmp_path: Path, override: str, sentence: str
) -> None:
    started = time.process_time()
    said = refusal(write(tmp_path), override)
    assert sentence in said
    assert len(said) < 1000
    assert time.process_time() - started < 2


def test_thousands_of_wrong_keys_take_no_longer_than_twenty(tmp_path: Path) -> None:
    path = write(tmp_path, "".join(f"key_{n}: 1\n" for n in range(8000)) + f"? {'k' * 50_000}\n: 1\n")
    said = refusal(path)
    assert len(said.splitlines()) == 21
    assert said.endswith("8,001 problems in all")
