"""Lets SGLang import and run on a CPU, for which it ships no kernels: the test environment's own.

With this folder on PYTHONPATH every Python process does the following, each when SGLang asks for it
by an import. The CPU path calls nothing of what is left empty here.

- ``sgl_kernel``, which has no CPU wheel, becomes an empty module in which every name exists. The
  hash behind seeds, a kernel of SGLang's, is written here in torch.
- torchvision's operators are declared before it is imported: its wheel expects a CUDA build.
- Nothing is compiled: it would take a minute to gain nothing on models this small.
- The deterministic mode may run on torch's attention, and does without its kernels, which are for
  GPUs. So seeds are honoured; that results do not depend on the batch is not promised.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import types

_TORCHVISION_OPS = (
    "nms", "qnms", "roi_align", "_roi_align_backward", "roi_pool", "_roi_pool_backward",
    "ps_roi_align", "_ps_roi_align_backward", "ps_roi_pool", "_ps_roi_pool_backward",
    "deform_conv2d", "_deform_conv2d_backward",
)  # fmt: skip


class _Anything:
    """Stands for whatever is imported from the kernels and never used."""

    def __init__(self, *args, **kwargs):
        pass

    def __call__(self, *args, **kwargs):
        return _Anything()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything()

    def __mro_entries__(self, bases):
        return (object,)


class _EmptyModule(types.ModuleType):
    __path__: list[str] = []  # noqa: RUF012
    __version__ = "0.99.0"

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        if name[0].isupper():  # a class, to inherit from or to ask about
            stand_in = type(name, (object,), {"__init__": lambda self, *args, **kwargs: None})
            setattr(self, name, stand_in)
            return stand_in
        return _Anything()


class _Kernels(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "sgl_kernel":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return _EmptyModule(spec.name)

    def exec_module(self, module):
        pass


_kept = []  # operators go with the last reference to what declared them


def _declare_torchvision() -> None:
    from torch import library

    ops = library.Library("torchvision", "FRAGMENT")
    _kept.append(ops)
    for op in _TORCHVISION_OPS:
        with contextlib.suppress(RuntimeError):  # a build of torchvision that declares it itself
            ops.define(f"{op}(Tensor x) -> Tensor")


def _write_hash_in_torch(murmur_hash) -> None:
    """MurmurHash3 (32 bit) of seed, position and column: [rows, columns], as SGLang's kernel."""
    import torch

    low = 0xFFFFFFFF

    def rotate(x, by):
        return ((x << by) | (x >> (32 - by))) & low

    def mix(h, k):
        k = (rotate((k * 0xCC9E2D51) & low, 15) * 0x1B873593) & low
        return (rotate(h ^ k, 13) * 5 + 0xE6546B64) & low

    def murmur_hash32(seed, positions, columns):
        seed = seed.view(torch.int64)[:, None]
        h = torch.zeros(1, 1, dtype=torch.int64)
        for k in (seed & low, (seed >> 32) & low, positions.long()[:, None], columns.long()[None]):
            h = mix(h, k)
        h = h ^ 16
        h = ((h ^ (h >> 16)) * 0x85EBCA6B) & low
        h = ((h ^ (h >> 13)) * 0xC2B2AE35) & low
        return (h ^ (h >> 16)).to(torch.uint32)

    murmur_hash.murmur_hash32 = murmur_hash32


def _allow_torch_attention(server_args) -> None:
    for add in (
        server_args.add_deterministic_attention_backend_choices,
        server_args.add_radix_supported_deterministic_attention_backend_choices,
    ):
        add(["torch_native"])


def _do_without_kernels(model_runner) -> None:
    model_runner.ModelRunner.maybe_enable_batch_invariant_mode = lambda self: None


_BEFORE = {
    "torchvision": _declare_torchvision,
}
_AFTER = {
    "sglang.kernels.ops.sampling.murmur_hash": _write_hash_in_torch,
    "sglang.srt.server_args": _allow_torch_attention,
    "sglang.srt.model_executor.model_runner": _do_without_kernels,
}


class _Around(importlib.abc.MetaPathFinder):
    """Acts right before or right after one module is imported."""

    def find_spec(self, name, path=None, target=None):
        if before := _BEFORE.pop(name, None):
            before()
        if (after := _AFTER.pop(name, None)) is None:
            return None
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            after(module)

        spec.loader.exec_module = exec_module
        return spec


os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
sys.meta_path.append(_Kernels())  # last: a real sgl_kernel wins
sys.meta_path.insert(0, _Around())
