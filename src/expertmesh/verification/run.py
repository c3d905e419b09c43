"""Run a verification, from a configuration to its report: go through the layers in order and print the results.

Every rank calls it, under torchrun or our launcher, before the process group exists, as for training. It never changes
a run: it writes only the JSON report and a temporary directory beside `output_dir`, which it removes.
"""

import gc
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from expertmesh.config import Config
from expertmesh.config.errors import IntegrityError
from expertmesh.distributed.all_ranks import from_rank_0, raise_on_all_ranks
from expertmesh.distributed.mesh import current_device, start_process_group
from expertmesh.io.directory import io_errors, nearest, report_errors
from expertmesh.io.terminal import plural
from expertmesh.step.pipeline_schedule import schedule_kind
from expertmesh.training.control import Control
from expertmesh.training.reporting.start import versions
from expertmesh.verification.layers import CHECKS
from expertmesh.verification.options import VerifyOptions
from expertmesh.verification.proof import Proof, label
from expertmesh.verification.result import Layer, Report, head_lines, layer_lines, mutation_lines, say, write_json
from expertmesh.verification.self_test import self_test
from expertmesh.verification.setup import Setup, set_up

REPORT_FILE = "verification.json"
_SHOWN = 20


def verify(config: Config, control: Control | None = None) -> Report:
    """Verify the job of `config` on the ranks of the process group; `control.arguments` are `VerifyOptions` as JSON.

    Rank 0 prints the results and writes the report.

    Raises:
        InputError: On all ranks, if the configuration cannot run, or a file or directory cannot be written.
        IntegrityError: On all ranks, if a check failed.

    Collectives: every rank calls it, with the same configuration. It starts the process group.
    """
    control = control or Control()
    options = VerifyOptions.load(control.arguments)
    started = time.monotonic()
    start_process_group(current_device(), config.distributed.first_step_timeout_seconds)
    control.progress.at(0, "reading the data")
    with raise_on_all_ranks("preparing the verification"):
        setup = set_up(config, options, dist.get_world_size())
    torch.manual_seed(config.train.seed + dist.get_rank())
    report = Report(_facts(setup, options))
    say(head_lines(report.facts))
    with ExitStack() as stack:
        scratch = stack.enter_context(_scratch(config, options))
        # A built job is part of reference cycles, so it has to be collected before the next one is built. Freezing the
        # million objects that exist already, most of them from imports, keeps these collections short.
        gc.freeze()
        stack.callback(gc.unfreeze)
        proof = Proof(setup, scratch)
        for name in CHECKS:
            if name in options.only:
                control.progress.at(0, f"verifying: {name}")
                began = time.monotonic()
                layer = Layer(name, CHECKS[name](proof), round(time.monotonic() - began, 3))
                report.layers.append(layer)
                say(layer_lines(layer))
        if options.self_test:
            control.progress.at(0, "verifying: self-test")
            proof.free_jobs()
            report.mutations = self_test(proof)
            say(mutation_lines(report.mutations))
    report.seconds = round(time.monotonic() - started, 3)
    _finish(report, config, options)
    return report


def _finish(report: Report, config: Config, options: VerifyOptions) -> None:
    # Rank 0 decides, so that all ranks raise the same error.
    failures = from_rank_0([line[:500] for line in report.failures[:_SHOWN]])
    path = options.report or (None if options.random_data else str(Path(config.output_dir) / REPORT_FILE))
    with raise_on_all_ranks("writing the report"):
        if path is not None and dist.get_rank() == 0:
            with report_errors(path):
                write_json(report, Path(path))
    where = f"; {path}" if path is not None else ""
    if failures:
        count = len(report.failures)
        raise IntegrityError(
            "\n".join([f"not verified: {plural(count, 'check')} failed{where}", *failures]), key="verify.failed"
        )
    checks = [check for layer in report.layers for check in layer.checks]
    done = sum(check.status == "pass" for check in checks)
    left = sum(check.status == "not run" for check in checks)
    caught = [mutation for mutation in report.mutations if mutation.status == "pass"]
    planted = [mutation for mutation in report.mutations if mutation.status != "not run"]
    tested = f", {len(caught)} of {len(planted)} planted bugs caught" if report.mutations else ""
    say([f"verified    {plural(done, 'check')} passed, {left} not run{tested} ({report.seconds:.0f} s){where}"])


def _facts(setup: Setup, options: VerifyOptions) -> dict[str, Any]:
    config, layout = setup.config, setup.layout
    first, schedule = setup.steps[0], None
    if layout.pp > 1 or setup.order.by_layer:
        count = len(first.batches(layout, dist.get_rank()).micro_batches)
        schedule = (
            "by layer" if setup.order.by_layer else schedule_kind(layout, count).__name__.removeprefix("Schedule")
        )
        schedule += f" over {count} micro-batch{'es' if count > 1 else ''}"
    return {
        "model": config.model.name_or_path,
        "model_type": setup.model_config.model_type,
        "layers": setup.layers[0],
        "layers_of_the_model": setup.layers[1],
        "layout": {axis: layout.size(axis) for axis in ("pp", "replicate", "fsdp", "cp", "tp", "ep", "efsdp")},
        "schedule": schedule,
        "ranks": layout.world_size,
        "device": current_device().type,
        "precision": label(config.precision),
        "lora": config.lora is not None,
        "steps": len(setup.steps),
        "samples_of_a_step": len(first.dataset),
        "tokens_of_a_step": first.dataset.tokens,
        "targets_of_a_step": first.targets,
        "packing": config.data.packing,
        "objective": config.objective.name,
        "only": list(options.only),
        "notes": list(setup.notes),
        "versions": versions(),
    }


@contextmanager
def _scratch(config: Config, options: VerifyOptions) -> Iterator[Path]:
    """Make a directory that all ranks can read, and remove it after the block.

    It is in the nearest existing parent of `output_dir`; with random data, in the working directory.

    Raises:
        InputError: On all ranks, if rank 0 cannot make it.

    Collectives: every rank enters it; one broadcast and one small all-reduce on the default group.
    """
    made = ""
    with raise_on_all_ranks("making a directory for what is saved"):
        if dist.get_rank() == 0:
            beside = Path.cwd() if options.random_data else nearest(Path(config.output_dir).absolute().parent)
            with io_errors(beside, 0):
                made = tempfile.mkdtemp(prefix=".expertmesh-verify-", dir=beside)
    directory = Path(from_rank_0(made))
    try:
        yield directory
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(directory, ignore_errors=True)
