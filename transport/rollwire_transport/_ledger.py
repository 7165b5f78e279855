"""What was sent or received so far, as sums of spans, and the digests that follow from them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollwire_transport._digest import digest_of_sum, sum_digests

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rollwire_transport._manifest import Manifest


class Ledger:
    """The span sums of each bucket of an update. A bucket that comes again replaces its entry."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._sums: dict[int, tuple[int, ...]] = {}
        self._digests: dict[str, int] | None = None

    def enter(self, index: int, sums: Sequence[int]) -> None:
        """Notes the span sums of a bucket."""
        self._sums[index] = tuple(sums)
        self._digests = None

    def settle(self) -> None:
        """Computes the digests, if every bucket was entered. That takes a while for many tensors:
        who asks for them later may be an event loop.
        """
        if len(self._sums) == len(self._manifest.buckets):
            self.digests()

    def digests(self) -> dict[str, int]:
        """The digest of each tensor, aliases left out.

        Raises:
            RuntimeError: Not every bucket was entered.
        """
        if self._digests is not None:
            return self._digests
        buckets = self._manifest.buckets
        if missing := len(buckets) - len(self._sums):
            raise RuntimeError(f"{missing} of {len(buckets)} buckets are missing: no digest yet")
        totals = [0] * len(self._manifest.tensors)
        for index, bucket in enumerate(buckets):
            for span, total in zip(bucket.spans, self._sums[index], strict=True):
                totals[span.tensor] += total
        self._digests = {
            spec.name: digest_of_sum(spec, total)
            for spec, total in zip(self._manifest.tensors, totals, strict=True)
            if spec.alias_of is None
        }
        return self._digests

    def digest(self) -> int:
        """The digest of the whole update.

        Raises:
            RuntimeError: Not every bucket was entered.
        """
        return sum_digests(self.digests().values())
