"""``/update_weights_from_disk``: a checkpoint folder becomes the policy of the fleet."""

from __future__ import annotations

import asyncio
import json
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING

from rollwire_client._concurrency import run_in_thread
from rollwire_client._errors import (
    MissingDependencyError,
    RollwireError,
    SourceError,
)
from rollwire_client._gateway.errors import HttpError, http_error, invalid
from rollwire_client._publishing.checkpoint import open_checkpoint
from rollwire_client._publishing.publisher import Publisher

if TYPE_CHECKING:
    from rollwire_client._data import PublishReport
    from rollwire_client._fleet.fleet import Fleet
    from rollwire_client._gateway.metrics import GatewayMetrics

_INDEX = "model.safetensors.index.json"


class WeightUpdater:
    """Publishes checkpoint folders, one after the other."""

    def __init__(self, fleet: Fleet, roots: tuple[Path, ...], metrics: GatewayMetrics) -> None:
        self._fleet = fleet
        self._roots = roots
        self._metrics = metrics
        self._publisher: Publisher | None = None
        self._busy = asyncio.Lock()

    async def update(self, folder: str, version: int | None) -> PublishReport:
        """Publishes the whole folder, or nothing; without a version, as the one after the newest.

        Raises:
            HttpError: The folder is not a whole checkpoint, or no server has taken it.
        """
        path = self._allowed(folder)
        if self._busy.locked():
            raise HttpError(
                HTTPStatus.CONFLICT, "another update is under way", code="update_in_progress"
            )
        async with self._busy:
            try:
                report = await self._publish(path, version)
            except (RollwireError, OSError) as error:
                self._metrics.updates.labels("failed").inc()
                if isinstance(error, OSError) and not isinstance(error, MissingDependencyError):
                    raise invalid(f"{path} cannot be read: {error}", "model_path") from error
                raise http_error(error) from error
        self._metrics.updates.labels("incomplete" if report.failed else "committed").inc()
        return report

    async def _publish(self, path: Path, version: int | None) -> PublishReport:
        if self._publisher is None:
            self._publisher = Publisher(self._fleet)  # says if torch is missing
        await run_in_thread(lambda: check_folder(path))
        if version is None:
            version = (await self._fleet.newest_version() or 0) + 1
        with open_checkpoint(path) as tensors:
            handle = await self._publisher.publish(version, tensors)
            try:
                return await handle.committed
            except asyncio.CancelledError:
                await handle.cancel()
                raise

    def _allowed(self, folder: str) -> Path:
        try:
            path = Path(folder).resolve()
        except (OSError, ValueError, RuntimeError) as error:  # a NUL, or a circle of links
            raise invalid(f"{folder!r:.200} is not a path: {error}", "model_path") from error
        if not any(path.is_relative_to(root) for root in self._roots):
            listed = ", ".join(map(str, self._roots)) or "none"
            raise HttpError(
                HTTPStatus.FORBIDDEN,
                f"{folder} is in no folder that updates may come from (--checkpoints): {listed}",
                code="folder_not_allowed",
                param="model_path",
            )
        return path


def check_folder(folder: Path) -> None:
    """Reads all of a checkpoint folder, before a server hears of it.

    Raises:
        SourceError: It is not a whole checkpoint.
    """
    index = folder / _INDEX
    with open_checkpoint(folder) as tensors:
        for name in tensors:
            try:
                tensor = tensors[name]
            except Exception as error:
                raise SourceError(f"{folder}: {name} cannot be read: {error}") from error
            if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
                raise SourceError(f"{folder}: {name} has values that are NaN or infinite")
        if index.exists():
            try:
                listed = set(json.loads(index.read_bytes())["weight_map"])
            except (ValueError, KeyError, TypeError) as error:
                raise SourceError(f"{index} is not an index of tensors: {error}") from error
            if missing := sorted(listed - set(tensors)):
                raise SourceError(
                    f"{folder} lacks {len(missing)} of the tensors that {_INDEX} names, such as "
                    f"{missing[0]}: is it being written?"
                )
