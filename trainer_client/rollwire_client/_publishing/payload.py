"""What servers of a publish are sent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import rollwire_transport as transport

if TYPE_CHECKING:
    from rollwire_client._publishing.tensors import TensorSource


@dataclass(frozen=True, eq=False, slots=True)
class Payload:
    """An update in one of its encodings.

    Attributes:
        manifest: As it is announced.
        source: Gives the tensors of ``layout``.
        cast: Whether floating-point tensors are cast to the manifest's dtypes.
        is_copy: Whether the tensors are the publisher's own, which the trainer does not change.
    """

    manifest: transport.Manifest
    source: TensorSource
    cast: bool
    is_copy: bool

    @property
    def encoding(self) -> transport.Encoding:
        return self.manifest.encoding

    @property
    def layout(self) -> transport.Manifest:
        """Of what goes over the link."""
        if self.encoding is transport.Encoding.DELTA:
            return transport.delta_layout(self.manifest)
        return self.manifest

    @property
    def nbytes(self) -> int:
        return sum(bucket.size for bucket in self.layout.buckets)
