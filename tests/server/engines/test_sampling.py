from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rollwire_server.engines.embedded.sampling import (
    BASES,
    SamplingMetadata,
    SamplingNoise,
    log_probabilities,
    sample,
)
from support.examples import examples
from torch import Tensor

VOCAB = 24


def rows(n: int = 1, **columns: object) -> SamplingMetadata:
    def column(name: str, default: float, dtype: type) -> np.ndarray:
        return np.broadcast_to(np.asarray(columns.get(name, default), dtype), n).copy()

    return SamplingMetadata(
        temperature=column("temperature", 1.0, np.float32),
        top_k=column("top_k", 0, np.int64),
        top_p=column("top_p", 1.0, np.float32),
        min_p=column("min_p", 0.0, np.float32),
        noise_keys=np.arange(n, dtype=np.int64),
        basis=column("basis", 0, np.int64),
    )


def kept(scores: list[float], top_k: int, top_p: float, min_p: float) -> dict[int, float]:
    """What may be drawn, and how likely, told slowly: top-k, then top-p, then min-p."""
    order = sorted(range(len(scores)), key=lambda i: -scores[i])
    weights = {i: float(np.exp(np.float64(scores[i]) - max(scores))) for i in order}
    if top_k:
        least = weights[order[min(top_k, len(order)) - 1]]
        weights = {i: w for i, w in weights.items() if w >= least}
    total, mass, within = sum(list(weights.values())[: top_k or None]), 0.0, {}
    for i, weight in weights.items():
        if mass >= top_p * total:
            break
        within[i] = weight
        mass += weight
    floor = min_p * max(within.values())
    within = {i: w for i, w in within.items() if w >= floor}
    return {i: w / sum(within.values()) for i, w in within.items()}


@settings(max_examples=examples(200))
@given(
    scores=st.lists(st.integers(-40, 40), min_size=VOCAB, max_size=VOCAB, unique=True),
    temperature=st.sampled_from([0.25, 1.0, 2.0]),
    top_k=st.integers(0, VOCAB + 2),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.1, 0.7]),
)
def test_truncation_is_top_k_then_top_p_then_min_p(
    scores: list[int], temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits = torch.tensor([scores], dtype=torch.float32) / 8
    basis = [b.value for b in BASES].index("sampled")
    how = rows(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, basis=basis)
    got = log_probabilities(logits, how)[0].exp()
    expected = torch.zeros(VOCAB)
    for token, probability in kept((logits[0] / temperature).tolist(), top_k, top_p, min_p).items():
        expected[token] = probability
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-4)


def test_equal_scores_share_their_fate() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 2.0, 2.0, 0.0]])
    basis = [b.value for b in BASES].index("sampled")
    assert log_probabilities(logits, rows(top_k=2, basis=basis)).exp()[0].count_nonzero() == 4


def test_rows_do_not_depend_on_their_neighbours() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(64, 300, generator=generator) * 3
    choose = np.random.default_rng(0)
    how = SamplingMetadata(
        temperature=choose.choice(np.float32([0, 0.5, 1, 1.5]), 64),
        top_k=choose.choice([0, 5, 299, 1000], 64),
        top_p=choose.choice(np.float32([0.3, 0.9, 1]), 64),
        min_p=choose.choice(np.float32([0, 0.1]), 64),
        noise_keys=choose.integers(-(2**63), 2**63, 64),
        basis=choose.integers(0, 3, 64),
    )
    noise = SamplingNoise(300, torch.device("cpu"))
    whole = sample(logits, how, noise)
    for part in (slice(0, 1), slice(5, 12), slice(63, 64)):
        some = SamplingMetadata(
            **{
                name: getattr(how, name)[part]
                for name in ("temperature", "top_k", "top_p", "min_p", "noise_keys", "basis")
            }
        )
        got = sample(logits[part], some, noise)
        for of_some, of_all in zip(got, whole, strict=True):
            assert torch.equal(of_some, of_all[part])


def noise_of(seeds: list[int], positions: list[int], vocab: int = VOCAB) -> Tensor:
    keys = SamplingNoise.keys(np.array(seeds, np.uint64), np.array(positions, np.int64))
    return SamplingNoise(vocab, torch.device("cpu")).exponential(torch.from_numpy(keys))


def test_noise_is_what_it_always_was() -> None:
    got = noise_of([0, 1, 2**64 - 1], [0, 7, 4000])[:, :3]
    expected = torch.tensor(
        [
            [1.3174027, 0.84349668, 2.2246423],
            [1.8226408, 0.74750602, 0.12036794],
            [0.48663399, 2.5104063, 0.43194056],
        ]
    )
    torch.testing.assert_close(got, expected, atol=0, rtol=1e-6)


@pytest.mark.parametrize("vary", ["seed", "position", "token"])
def test_noise_is_exponential_and_independent(vary: str) -> None:
    n = 100_000
    if vary == "token":
        noise = noise_of([5, 5], [0, 1], n)
    else:
        counts = list(range(n))
        fixed = [3] * n
        columns = (counts, fixed) if vary == "seed" else (fixed, counts)
        noise = noise_of(*columns, vocab=2).T
    assert noise.min() > 0
    uniform = (-noise.double()).exp()
    for row in uniform:
        counts = torch.histc(row, 50, 0, 1)
        chi2 = ((counts - n / 50) ** 2 / (n / 50)).sum().item()
        assert chi2 < 49 + 5 * (2 * 49) ** 0.5
    assert abs(torch.corrcoef(uniform)[0, 1]) < 5 / n**0.5
    assert abs(torch.corrcoef(torch.stack([uniform[0, :-1], uniform[0, 1:]]))[0, 1]) < 5 / n**0.5


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_noise_is_the_same_on_a_gpu() -> None:
    keys = torch.arange(-50, 50) * 0x1234567890ABCD
    here = SamplingNoise(5000, torch.device("cpu")).exponential(keys)
    there = SamplingNoise(5000, torch.device("cuda")).exponential(keys.cuda()).cpu()
    torch.testing.assert_close(there, here, atol=0, rtol=1e-6)
