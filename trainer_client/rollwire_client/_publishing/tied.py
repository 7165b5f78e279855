"""Tensors of a trainer's own whose names share one tensor on the servers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import rollwire_transport as transport
import torch

from rollwire_client._publishing.problems import mismatch
from rollwire_client._publishing.schema import check_given

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rollwire_client._publishing.names import ServerNames
    from rollwire_client._publishing.tensors import TensorOrFunction


class TiedTensors:
    """Checks that such tensors hold the values of the one that is sent, in the servers' dtype.

    Mixed precision and sharding take tied weights apart. Digests are compared, so that no two of
    the tensors are needed at once.
    """

    def __init__(self, names: ServerNames) -> None:
        self._names = names
        self._digests: dict[str, tuple[str, str, int]] = {}

    def add(self, local_name: str, sent_as: str, value: TensorOrFunction) -> None:
        """Takes the digest of a tensor. Called in the thread that reads the source.

        Args:
            local_name: Its name.
            sent_as: The trainer's name of the tensor that is sent.
            value: The tensor. A function is called, a DTensor gathered.

        Raises:
            SchemaMismatchError: A function gives another shape, or a dtype that cannot be cast.
        """
        tensor = transport.materialize(value).tensor.detach()
        del value
        spec = check_given(local_name, tensor, self._names, cast=True).spec
        name = spec.alias_of or local_name
        sent = self._names.specs[name]
        tensor = tensor.to(getattr(torch, sent.dtype))
        self._digests[local_name] = name, sent_as, transport.tensor_digest(sent, tensor)

    def check(self, digests: Mapping[str, int]) -> None:
        """Raises SchemaMismatchError unless they equal what was sent, of which these are the
        digests.
        """
        for local_name, (name, sent_as, digest) in self._digests.items():
            if digests[name] != digest:
                alias = sent_as if local_name == name else local_name
                raise mismatch(
                    f"{alias} is tied to {name} on the servers, and a tensor of its own with other "
                    "values here: tie them, or leave it out"
                )
