"""Memory that SGLang's processes share: where the tensors of an update lie in it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rollwire_server.engines.sglang import cuda_memory
from rollwire_server.engines.sglang.shared_memory import allocate, allocate_on
from rollwire_transport import TensorSpec, plan
from rollwire_transport.slots import home
from rollwire_transport.tensors import as_bytes, nbytes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rollwire_transport import Manifest
    from torch import Tensor

CPU = torch.device("cpu")

specs = st.lists(st.integers(0, 3000), min_size=1, max_size=20).map(
    lambda sizes: [TensorSpec(f"t{i}", "uint8", (size,)) for i, size in enumerate(sizes)]
)


def homes(manifest: Manifest, staged: Mapping[str, Tensor]) -> list[Tensor | None]:
    targets = {i: as_bytes(staged[spec.name]) for i, spec in enumerate(manifest.tensors)}
    return [home(bucket, targets, CPU) for bucket in manifest.buckets]


@settings(deadline=None)
@given(specs)
def test_buckets_have_their_place_in_it(specs: list[TensorSpec]) -> None:
    assert all(place is not None for place in homes(plan(specs, bucket_bytes=640), allocate(specs)))


@settings(deadline=None)
@given(specs, st.integers(1, 4))
def test_devices_have_about_as_much_each(specs: list[TensorSpec], devices: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_memory, "share", lambda _: {})  # of which there is none here
        staged = allocate_on([CPU] * devices, specs, ranks=1)
    sizes = [0] * devices
    for place in staged.layout.places:
        sizes[place.part] += place.nbytes
    largest = max(nbytes(spec) for spec in specs)
    most = sum(sizes) / devices + largest + 64 * len(specs)
    assert max(sizes) <= most
    for number, spec in enumerate(specs):
        staged[spec.name].fill_(number)
    assert all((staged[spec.name] == number).all() for number, spec in enumerate(specs))
    # All but the buckets across two devices come in place.
    cut = sum(place is None for place in homes(plan(specs, bucket_bytes=640), staged))
    assert cut < devices
