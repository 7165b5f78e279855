"""A publisher's copy of its policy: what it sends, and what it finds the next changes by."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import rollwire_transport as transport
import torch

from rollwire_client._publishing.payload import Payload
from rollwire_client._publishing.source_reading import SourceReading

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from rollwire.types import WeightTag
    from torch import Tensor

    from rollwire_client._fleet.server_handle import ServerHandle
    from rollwire_client._publishing.tensors import TensorSource

logger = logging.getLogger(__name__)

# A copy takes at most this share of the memory that is free: the rest is for what the trainer has
# not allocated yet.
_DEVICE_SHARE = 1 / 4
_HOST_SHARE = 1 / 2

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class CopiedPolicy:
    """A policy in a publisher's copy, whole and as the change since the last one.

    Attributes:
        full: The whole policy.
        delta: What changed; None if it is not known, or a full refresh is due.
        base: The weights that ``delta`` builds on.
        digests: The digest of each tensor.
        casts: By name, the dtypes from which tensors were cast.
        changed_share: Of 16-bit words; None if it is not known.
        seconds: How long it took to read and to compare.
    """

    full: Payload
    delta: Payload | None
    base: WeightTag | None
    digests: Mapping[str, int]
    casts: Mapping[str, str]
    changed_share: float | None
    seconds: float

    @property
    def digest(self) -> int:
        return transport.sum_digests(self.digests.values())

    def takers_of_delta(self, servers: Sequence[ServerHandle]) -> list[ServerHandle]:
        """Those of the servers that are known to hold its base, and take deltas."""
        base = None if self.base is None else (self.base.version, self.base.digest)
        return [
            server
            for server in servers
            if server.info is not None
            and server.info.accepts_deltas
            and (server.info.weights.version, server.info.weights.digest) == base
        ]


class PolicyCopy:
    """Keeps a copy from one publish to the next.

    Args:
        full_every: Every so many publishes all servers get the whole policy; None: only where they
            need it.
        timeout: Seconds that the trainer's source may take over a bucket.
    """

    def __init__(self, full_every: int | None, timeout: float) -> None:
        self._full_every = full_every
        self._timeout = timeout
        self._copy: transport.PublishedCopy | None = None
        self._base: WeightTag | None = None  # what it holds, if that was committed last
        self._deltas = 0  # publishes since the last that was full
        self._is_off = False

    async def take(
        self,
        manifest: transport.Manifest,
        source: TensorSource,
        *,
        device: torch.device | None,
        cast: bool,
    ) -> CopiedPolicy | None:
        """Reads the source to its end. Call ``committed`` once servers have committed the policy:
        the next delta builds on it.

        Args:
            manifest: A plan of the tensors.
            source: Gives them.
            device: Where they lie; None is the CPU.
            cast: Whether floating-point tensors are cast to the manifest's dtypes.

        Returns:
            None, now and from now on, if there is no memory for a copy.

        Raises:
            SchemaMismatchError, SourceError: As ``SourceReading.run``.
        """
        device = device or _CPU
        if self._is_off or (copy := self._place(manifest, device)) is None:
            return None
        if self._base is None:
            copy.forget()
        base, self._base = self._base, None
        began = time.monotonic()
        reading = SourceReading(device, self._timeout, lambda: copy.packing)
        try:
            snapshot = await reading.run(
                lambda stop: copy.take(manifest, source, device=device, cast=cast, stop=stop)
            )
        except (RuntimeError, MemoryError) as error:  # torch's, and numpy's
            self._turn_off(f"a copy of the policy could not be made: {error}")
            return None
        finally:
            if reading.timeout is not None:
                self._copy = None  # the thread that stays behind may still write to it
        seconds = time.monotonic() - began
        found = snapshot.delta
        if found is not None and found.manifest.base_digest == snapshot.digest:
            self._base = base  # nothing has changed: it holds that whatever becomes of this publish
        full, delta = _payload(manifest, snapshot.tensors), None
        if found is not None and self._deltas + 1 != self._full_every:
            delta = _payload(found.manifest, found.tensors)
            if delta.nbytes >= full.nbytes:
                delta = None
        self._deltas = 0 if delta is None else self._deltas + 1
        return CopiedPolicy(
            full=full,
            delta=delta,
            base=base,
            digests=snapshot.digests,
            casts=snapshot.casts,
            changed_share=None if found is None else found.changed_words / max(found.words, 1),
            seconds=seconds,
        )

    def committed(self, weights: WeightTag | None) -> None:
        """Servers serve what was copied last, under this tag."""
        self._base = weights

    def _place(
        self, manifest: transport.Manifest, device: torch.device
    ) -> transport.PublishedCopy | None:
        if self._copy is not None and self._copy.device in {device, _CPU}:
            return self._copy
        self._copy, self._base = None, None
        size = sum(bucket.size for bucket in manifest.buckets)
        place = _place_for(size, device)
        if place is None:
            self._turn_off(
                f"a copy of the policy takes {size / 1e9:.1f} GB: more than a quarter of the free "
                "memory of its device, and more than half of that of the host"
            )
            return None
        self._copy = transport.PublishedCopy(place)
        return self._copy

    def _turn_off(self, why: str) -> None:
        self._is_off = True
        self._copy = None
        logger.warning("every update is sent whole from now on, not as what changed: %s", why)


def _payload(
    manifest: transport.Manifest, tensors: Mapping[str, Tensor | Callable[[], Tensor]]
) -> Payload:
    return Payload(manifest, tensors.items, cast=False, is_copy=True)


def _place_for(size: int, device: torch.device) -> torch.device | None:
    """Where a copy of so many bytes may lie: on the device, else in host memory."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        if size <= (transport.free_memory(device) + cached) * _DEVICE_SHARE:
            return device
    return _CPU if size <= transport.free_memory(_CPU) * _HOST_SHARE else None
