"""joblib's own ways to local processes, dask and ray; results as they come."""

import itertools
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import BrokenExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal

import joblib

from sandbox.errors import BadInput

Backend = Literal["loky", "dask", "ray"]
ONE_BY_ONE: dict[str, Any] = {"batch_size": 1}  # a task is long enough; joblib would send several at once


@contextmanager
def workers_of(workers: int, backend: Backend, address: str | None, folder: Path) -> Iterator[None]:
    """joblib's calls inside go to that many local processes (all cores at -1), or to the cluster at `address`.

    Raises BadInput: no such backend or cluster here; a worker that died, saying that finished tasks are in `folder`.
    """
    if address and backend == "loky":
        raise BadInput(f"address is {address}, and backend loky has none: it is that of a dask or ray cluster")
    lost: tuple[type[BaseException], ...] = (BrokenExecutor,)
    with ExitStack() as stack:
        try:
            if backend == "dask":
                from distributed import Client, KilledWorker

                lost = (*lost, KilledWorker)
                local = {"n_workers": workers if workers > 0 else os.cpu_count(), "threads_per_worker": 1}
                stack.enter_context(Client(address) if address else Client(**local, dashboard_address=None))
            if backend == "ray":
                import ray  # type: ignore[import-not-found]
                from ray.util.joblib import register_ray  # type: ignore[import-not-found]

                ray.init(address=address, log_to_driver=False)
                stack.callback(ray.shutdown)
                register_ray()
        except ImportError as error:
            raise BadInput(
                f"backend {backend} needs {error.name}: pip install 'mismatch-sandbox[{backend}]'"
            ) from error
        except (OSError, TimeoutError, ValueError) as error:
            raise BadInput(f"backend {backend}: no cluster at {address}: {error}") from error
        stack.enter_context(joblib.parallel_config(backend, n_jobs=workers))
        try:
            yield
        except lost as error:
            raise BadInput(f"a worker died; every finished task is in {folder}, go on with --resume") from error


def as_they_come(calls: Iterable[Any]) -> Iterator[Any]:
    """Results in order of completion; in waves where the backend can only give them all at once."""
    try:
        pool: Any = joblib.Parallel(**ONE_BY_ONE, return_as="generator_unordered")
    except ValueError:
        calls, size = iter(calls), 4 * joblib.effective_n_jobs()
        with joblib.Parallel(**ONE_BY_ONE) as pool:  # one pool of processes for all waves
            while wave := list(itertools.islice(calls, size)):
                yield from pool(wave)
    else:
        yield from pool(calls)
