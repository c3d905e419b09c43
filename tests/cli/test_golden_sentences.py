"""What users read when something is wrong, word for word, one of each kind. Other tests assert class and key."""

from collections.abc import Callable
from pathlib import Path

import pytest

from expertmesh.checkpoint.directory import locate
from expertmesh.cli.main import main
from expertmesh.config import ParallelConfig
from expertmesh.config.errors import ExpertmeshError, IntegrityError
from expertmesh.distributed.layout import resolve_layout
from expertmesh.launcher.hangs import RankSnapshot, hang_error
from expertmesh.launcher.launch import RunOptions, join_job
from expertmesh.launcher.rank_files import RankFailure, root_cause
from expertmesh.training.control import RankStatus, StopState
from tests.config.minimal import MINIMAL


@pytest.mark.parametrize(
    ("text", "overrides", "sentence"),
    [
        ("", ["lr=1"], "override 'lr=1': lr is not a key of the configuration; did you mean optim.learning_rate?"),
        (
            "learning_rate: 1.0\n",
            [],
            "run.yaml:5: learning_rate is not a key of the configuration; it belongs under optim",
        ),
        (
            "train: {max_steps: many}\n",
            [],
            "run.yaml:5: train.max_steps must be an integer of at least 1 or null, not 'many'",
        ),
        (
            "",
            ["model.revision=1e5"],
            "override 'model.revision=1e5': model.revision must be text or null, not the number 100000.0; put it in "
            "quotes",
        ),
        ("", ["data={eval: []}"], "override 'data={eval: []}': data.train is missing; add it"),
        (
            "parallel: {ep: 4, fsdp: 6}\n",
            [],
            "run.yaml:5: parallel.ep is 4, which does not divide parallel.fsdp (6); set parallel.ep to auto or one of "
            "1, 2, 3, 6, or parallel.fsdp to auto",
        ),
        ("output_dir: b\n", [], "run.yaml:5: output_dir is given twice (first on line 4); remove one"),
        (
            "train: [1\n",
            [],
            "run.yaml:6: this is not valid YAML (while parsing a flow sequence expected ',' or ']', but got '<stream "
            "end>'); correct the line",
        ),
        ("lora: *x\n", [], "run.yaml:5: the alias *x is refused, because aliases are not read; repeat the value"),
        (
            "",
            ["train.seed"],
            "override 'train.seed' is not of the form key=value; write for example train.max_steps=10",
        ),
    ],
)
def test_a_wrong_configuration(
    text: str,
    overrides: list[str],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(MINIMAL + text)
    assert main(["train", "run.yaml", *overrides]) == 2
    assert capsys.readouterr().err == f"error: {sentence}\n"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["trian"], "No such command 'trian'. Did you mean 'train'?"),
        (["train", "a.yaml", "--nprocs", "2"], "No such option: --nprocs. Did you mean --nproc?"),
        (["train", "none.yaml"], "none.yaml: there is no such configuration file; check the path"),
    ],
)
def test_a_wrong_command_line(arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert capsys.readouterr().err == f"error: {sentence}\n"


TASK = {
    "SLURM_STEP_ID": "0",
    "SLURM_NTASKS": "2",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NODELIST": "n1",
}


@pytest.mark.parametrize(
    ("environment", "by"),
    [
        ({"RANK": "1", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "2"}, "the launcher that set RANK has started 2 ranks"),
        (TASK, "SLURM has started 2 ranks"),
    ],
)
def test_options_that_contradict_the_launcher(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], by: str
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ExpertmeshError) as caught:
        join_job(RunOptions(nproc=3))
    assert str(caught.value) == (
        f"--nproc is 3, but {by} on this machine; leave --nproc out, or let torchrun start the ranks of each machine"
    )


@pytest.mark.parametrize(
    ("refuse", "key", "sentence"),
    [
        (
            lambda: resolve_layout(ParallelConfig(ep=3), 6, 8),
            "layout.ep-divides-experts",
            "parallel.ep 3 does not divide the model's 8 experts; valid values: 1, 2",
        ),
        (
            lambda: locate(Path("nothing")),
            "checkpoint.not-found",
            "nothing: no such directory; give the output_dir of a run, or one of its checkpoints",
        ),
    ],
)
def test_a_layout_or_a_checkpoint_that_cannot_be(refuse: Callable[[], object], key: str, sentence: str) -> None:
    with pytest.raises(ExpertmeshError) as caught:
        refuse()
    assert (caught.value.key, str(caught.value)) == (key, sentence)


STATUS = RankStatus(1, 1, 85.0, 7, "update", 100.0, StopState.ACCEPTING)
WEIGHT = RankFailure(1, IntegrityError.exit_code, "a.safetensors: is damaged", "", 0, "weights.damaged")


def hang() -> ExpertmeshError | None:
    snapshot = RankSnapshot(1, STATUS, 100.0, stopped=True, stack=(), still_running=True)
    return hang_error([snapshot], None, None)


@pytest.mark.parametrize(
    ("find", "key", "sentence"),
    [
        (lambda: root_cause([WEIGHT], {1: 3}, {0: STATUS, 1: STATUS}), WEIGHT.key, "rank 1: a.safetensors: is damaged"),
        (
            lambda: root_cause([], {1: -9}, {1: STATUS}),
            "rank.ended-by-signal",
            "rank 1 was ended by signal 9 (SIGKILL) at step 7, update: if nobody sent it, the machine ran out of "
            "memory (the kernel's log says so)",
        ),
        (
            hang,
            "rank.hung",
            "rank 1 hung at step 7, update: it had not moved for 15 s; it was stopped by a signal (SIGSTOP); its "
            "Python stack could not be had",
        ),
    ],
)
def test_a_failed_rank(find: Callable[[], ExpertmeshError | None], key: str, sentence: str) -> None:
    error = find()
    assert error is not None
    assert (error.key, str(error)) == (key, sentence)
