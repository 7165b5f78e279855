"""The sum of a span (see ``digest``) in one pass over a GPU's memory.

torch alone writes and reads each word anew at every step of the mixing, some fifteen times.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# A program's share: enough words to be worth its start, few enough to keep every SM busy with the
# smallest bucket.
_BLOCK, _ROUNDS = 1024, 8


def sum_words(words: Tensor, first: int) -> Tensor:
    """The sum of int64 ``words``, contiguous, of which the first has index ``first`` in its tensor.

    Returns an int64 scalar on their device, without waiting for it.
    """
    total = words.new_zeros(())
    count = words.numel()
    if count:
        grid = (triton.cdiv(count, _BLOCK * _ROUNDS),)
        with torch.cuda.device(words.device):
            _sum_words[grid](words, total, first, count, _BLOCK, _ROUNDS)
    return total


# Not specialized on numbers, for each of which it would be compiled again.
@triton.jit(do_not_specialize=["first", "count"])  # type: ignore[untyped-decorator]
def _sum_words(words, total, first, count, block: tl.constexpr, rounds: tl.constexpr):  # type: ignore[no-untyped-def]
    start = tl.program_id(0).to(tl.int64) * block * rounds
    sums = tl.zeros((block,), tl.int64)
    for turn in range(rounds):
        index = start + turn * block + tl.arange(0, block)
        inside = index < count
        word = tl.load(words + index, mask=inside, other=0)
        key = (index + first).to(tl.uint64) * 0x9E3779B97F4A7C15
        x = word.to(tl.uint64, bitcast=True) + key
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB
        x = x ^ (x >> 31)
        sums += tl.where(inside, x.to(tl.int64, bitcast=True), 0)
    tl.atomic_add(total, tl.sum(sums, 0))
