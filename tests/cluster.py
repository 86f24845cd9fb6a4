"""What a Ray cluster does with pieces of work, without Ray: each goes as bytes to a worker that has nothing else."""

import os
import pickle
from collections.abc import Iterator
from typing import Any

from plume.data.pool import RayStage


def as_ray_would(stage: type, setup: tuple[Any, ...], tasks: list[Any], *, device: str = "cpu") -> Iterator[Any]:
    for task in tasks:
        worker = RayStage(*pickle.loads(pickle.dumps((stage, setup))), os.getcwd())
        yield pickle.loads(worker(pickle.dumps(task)))
