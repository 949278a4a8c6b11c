"""Pieces as tasks of Ray (https://www.ray.io, the extra `cluster`).

Without an address Ray is started on this machine for the time of the work, with nothing that listens beyond it.
"""

import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import Field

from subquad.compare.executors.cluster import Cluster, Job, Outcome
from subquad.compare.subprocesses import PATIENCE
from subquad.packages import require

SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",  # nothing is reported to anybody
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # it does not warn that it will change
    "RAY_NUM_REDIS_GET_RETRIES": "1",  # an address without a Ray is refused after a minute, not a quarter of an hour
}
"""Environment variables that Ray reads when it is imported."""
OBJECT_STORE_BYTES = 100 << 20
"""Of a Ray that is started here: jobs and outcomes are a few hundred bytes."""
LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""With this setting Ray uses the address 127.0.0.1 on every system, not only on those it is named after."""
LOCAL_SETTINGS: dict[str, Any] = {
    "include_dashboard": False,
    "object_store_memory": OBJECT_STORE_BYTES,
    # Ray would end a worker when memory gets short, and try again without an end. A training that the system ends is a
    # failed one, as without Ray.
    "_system_config": {"memory_monitor_refresh_ms": 0},
}


class Ray(Cluster[Any]):
    """Every piece is a task. Ray places it where its CPUs, GPUs and memory are free."""

    name = "ray"

    class Options(Cluster.Options):
        """Beside what all engines have."""

        memory: float = Field(0, ge=0, description="The gigabytes of memory of a training that Ray sets aside.")
        address: str | None = Field(
            None,
            description="The address of a running cluster, such as `auto` or 10.0.0.1:6379. By default Ray is started "
            "on this machine, unless the environment variable RAY_ADDRESS names a cluster.",
        )

    def start(self, out: Path) -> None:  # noqa: ARG002
        address = self.options.address or os.environ.get("RAY_ADDRESS")
        for name, value in {**SETTINGS, **({} if address else LOOPBACK)}.items():
            os.environ.setdefault(name, value)  # before Ray is imported
        self.ray = require("ray", "the executor ray", "cluster")
        self.owns = not self.ray.is_initialized()
        if self.owns:  # otherwise the program that calls us has connected
            self._connect(address)
        if not address:
            self._check_room()

    def _connect(self, address: str | None) -> None:
        local = {} if address else LOCAL_SETTINGS
        with _own_handlers():
            try:
                self.ray.init(address=address, log_to_driver=False, logging_level="error", **local)
            except (ConnectionError, RuntimeError, ValueError) as error:
                reason = str(error).strip().partition("\n")[0]
                raise ValueError(f"the executor ray: no Ray at {address or 'this machine'} ({reason})") from None

    def _check_room(self) -> None:
        """Refuses what would wait for ever. A cluster elsewhere may grow, and is not asked."""
        found = self.ray.cluster_resources()
        for name, wanted in (("CPU", self.options.cpus), ("GPU", self.options.gpus)):
            there = int(found.get(name, 0))
            if wanted > there:
                self.stop()
                raise ValueError(f"the executor ray: a training asks for {wanted} {name}s, and Ray has {there} here")

    def submit(self, job: Job) -> Any:
        options = self.options
        task = self.ray.remote(execute).options(
            name=job.piece.name,
            num_cpus=options.cpus,
            num_gpus=options.gpus,
            memory=int(options.memory * 2**30) or None,
            max_retries=0,  # the leader submits again, and says so
        )
        return task.remote(job)

    def wait(self, handles: Sequence[Any], seconds: float) -> Sequence[Any]:
        return self.ray.wait(list(handles), num_returns=1, timeout=seconds)[0]

    def outcome(self, handle: Any) -> Outcome:
        errors = self.ray.exceptions
        try:
            return self.ray.get(handle)
        except errors.RayTaskError as error:  # before our own code ran, such as a package that is missing there
            return Outcome(error=str(error).strip().rpartition("\n")[2])
        except errors.RayError as error:
            return Outcome(lost=f"{type(error).__name__} of Ray")

    def cancel(self, handles: Sequence[Any]) -> None:
        for handle in handles:
            self.ray.cancel(handle)
        if handles:
            self.ray.wait(list(handles), num_returns=len(handles), timeout=PATIENCE)

    def stop(self) -> None:
        if self.owns:
            with _own_handlers():
                self.ray.shutdown()


def execute(job: Job) -> Outcome:
    """The task."""
    return job()


@contextmanager
def _own_handlers() -> Iterator[None]:
    """Keeps the handler of SIGTERM, which Ray replaces when it connects."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
