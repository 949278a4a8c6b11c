"""Pieces as jobs of Slurm, through submitit (https://github.com/facebookincubator/submitit, the extra `cluster`).

What submitit writes and the output of every job are in the folder `slurm` of the comparison. Options of sbatch that are
none here, such as an account, go into the environment variables that sbatch reads (SBATCH_ACCOUNT).
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from subquad.compare.executors.cluster import Cluster, Job, Outcome
from subquad.compare.subprocesses import PATIENCE
from subquad.packages import require

FOLDER = "slurm"
RULE = "-" * 22
"""Submitit writes such a line before and after the trace of an error."""
LOOK_INTERVAL = 0.5
"""Seconds between two looks for results."""


class Slurm(Cluster[Any]):
    """Every piece is a job of its own. One that Slurm preempts, or whose time is over, is put into the queue again."""

    name = "slurm"

    class Options(Cluster.Options):
        """Beside what all engines have."""

        partition: str | None = Field(None, description="The partition of the jobs. By default Slurm chooses it.")
        time: int = Field(1440, ge=1, description="The minutes that a job may take before it is queued again.")
        memory: float | None = Field(None, gt=0, description="The gigabytes of memory of a job.")
        cluster: Literal["slurm", "local"] = Field(
            "slurm", description="With `local` jobs are processes of this machine, to try things without Slurm."
        )

    def start(self, out: Path) -> None:
        options = self.options
        submitit = require("submitit", "the executor slurm", "cluster")
        self.failed = submitit.core.utils.FailedJobError
        try:
            self.executor = submitit.AutoExecutor(
                folder=out.resolve() / FOLDER, cluster=options.cluster, slurm_max_num_timeout=options.retries
            )
        except RuntimeError:
            raise ValueError("the executor slurm: there is no sbatch here; give this command where Slurm is") from None
        self.executor.update_parameters(
            name="subquad",
            nodes=1,
            tasks_per_node=1,
            cpus_per_task=options.cpus,
            gpus_per_node=options.gpus,
            timeout_min=options.time,
            **({} if options.memory is None else {"mem_gb": options.memory}),
            **({} if options.partition is None else {"slurm_partition": options.partition}),
        )

    def submit(self, job: Job) -> Any:
        return self.executor.submit(Requeued(job))

    def wait(self, handles: Sequence[Any], seconds: float) -> Sequence[Any]:
        end = time.monotonic() + seconds
        while True:
            ended = [handle for handle in handles if handle.done()]
            if ended or time.monotonic() >= end:
                return ended
            time.sleep(LOOK_INTERVAL)

    def outcome(self, handle: Any) -> Outcome:
        error = handle.exception()
        if error is None:
            return handle.result()
        if isinstance(error, self.failed):  # before our own code ran, such as a package that is missing there
            return Outcome(error=str(error).split(RULE)[1].strip().rpartition("\n")[2])
        return Outcome(lost=f"job {handle.job_id} of Slurm: {handle.state.lower()}")

    def cancel(self, handles: Sequence[Any]) -> None:
        for handle in handles:
            handle.cancel(check=False)
        end = time.monotonic() + PATIENCE
        waiting = list(handles)
        while waiting and time.monotonic() < end:
            time.sleep(LOOK_INTERVAL)
            waiting = [handle for handle in waiting if not handle.done()]

    def stop(self) -> None:
        """Jobs of Slurm need nothing to be closed."""


@dataclass(frozen=True)
class Requeued:
    """A job that submitit puts into the queue again as it is, when it is preempted or its time is over."""

    job: Job

    def __call__(self) -> Outcome:
        return self.job()

    def checkpoint(self) -> Any:
        """Called by submitit, shortly before Slurm ends the job."""
        return require("submitit", "the executor slurm", "cluster").helpers.DelayedSubmission(self)
