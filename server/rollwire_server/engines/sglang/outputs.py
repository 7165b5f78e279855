"""SGLang's outputs, in the order in which it sent them.

SGLang's tokenizer manager is subclassed to receive the outputs directly: its own streams are
cumulative, share lists, and lose the order of tokens and answers.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Protocol

import torch

from rollwire_server.engines.base import RoutedExperts
from rollwire_server.engines.sglang.messages import SchedulerOutput

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from torch import Tensor


class ManagerListener(Protocol):
    """Receives what a manager reads, on the event loop."""

    def read(self, reader: Callable[[], Awaitable[None]]) -> None:
        """Runs the manager's loop in a task."""

    def on_outputs(self, outputs: list[SchedulerOutput]) -> None:
        """Receives the outputs of one step."""

    def on_barrier(self, name: str | None) -> None:
        """A barrier came back, after everything that was reported before it."""


def manager_class() -> type:
    """SGLang's tokenizer manager, made with a ``ManagerListener`` in front of its own arguments."""
    from sglang.srt.managers.io_struct import (
        AbortReq,
        BatchTokenIDOutput,
        ConfigureLoggingReq,
        async_sock_recv,
    )
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

    class OurManager(TokenizerManager):  # type: ignore[misc]  # no types
        def __init__(self, listener: ManagerListener, *args: Any, **kwargs: Any) -> None:
            self._listener = listener
            super().__init__(*args, **kwargs)
            self._expert_dtype = _expert_dtype(self.model_config.hf_text_config)

        def auto_create_handle_loop(self) -> None:
            """Without SGLang's signal handlers: the server has its own."""
            if self.event_loop is None:  # type: ignore[has-type]
                self.event_loop = asyncio.get_running_loop()
                self._listener.read(self.handle_loop)

        async def handle_loop(self) -> None:
            while True:
                received = await async_sock_recv(self.recv_from_detokenizer)
                if isinstance(received, BatchTokenIDOutput):
                    self._hand_over(_outputs(received, self._expert_dtype))
                elif isinstance(received, AbortReq):  # it ended before it was scheduled
                    self._hand_over([_bare(received.rid, [], [], ended="aborted")])
                elif isinstance(received, ConfigureLoggingReq):
                    self._listener.on_barrier(received.rid)
                else:
                    self._result_dispatcher(received)

        def _hand_over(self, outputs: list[SchedulerOutput]) -> None:
            for chunk in outputs:
                if chunk.ended is not None:
                    self.rid_to_state.pop(chunk.rid, None)
            self._listener.on_outputs(outputs)

    return OurManager


def _outputs(outputs: Any, expert_dtype: torch.dtype) -> list[SchedulerOutput]:
    """Splits the columns of one step by sequence."""
    if outputs.finished_reasons:
        return [_chunk(outputs, i, expert_dtype) for i in range(len(outputs.rids))]
    # Running sequences: see ``processes.shorten_running_outputs``.
    columns = (outputs.rids, outputs.output_ids, outputs.output_token_logprobs_val)
    return [
        _bare(rid, list(ids), list(logprobs)) for rid, ids, logprobs in zip(*columns, strict=True)
    ]


def _bare(
    rid: str, token_ids: list[int], logprobs: list[float], *, ended: str | None = None
) -> SchedulerOutput:
    return SchedulerOutput(rid, token_ids, logprobs, [], [], 0, ended)


def _chunk(outputs: Any, i: int, expert_dtype: torch.dtype) -> SchedulerOutput:
    tokens = list(outputs.output_ids[i])
    reason = outputs.finished_reasons[i]
    top: list[tuple[list[int], list[float]]] = []
    if outputs.output_top_logprobs_val and outputs.output_top_logprobs_val[i]:
        ids, values = outputs.output_top_logprobs_idx[i], outputs.output_top_logprobs_val[i]
        top = [(list(a), list(b)) for a, b in zip(ids, values, strict=True)][: len(tokens)]
    prompt = outputs.input_token_logprobs_val[i] if outputs.input_token_logprobs_val else []
    rows = outputs.routed_experts[i] if outputs.routed_experts else None
    return SchedulerOutput(
        rid=outputs.rids[i],
        token_ids=tokens,
        logprobs=list(outputs.output_token_logprobs_val[i])[: len(tokens)],
        top=top,
        prompt_logprobs=[value for value in prompt if value is not None],
        cached_tokens=outputs.cached_tokens[i],
        ended=None if reason is None else _end_reason(reason),
        routed_experts=None if rows is None else _routed(rows, expert_dtype),
    )


def _routed(rows: Tensor, dtype: torch.dtype) -> RoutedExperts:
    tokens, layers, top_k = rows.shape
    experts = rows.to(dtype).numpy().tobytes()
    return RoutedExperts(0, tokens, layers, top_k, experts, dtype.itemsize)


def _expert_dtype(config: Any) -> torch.dtype:
    """The smallest type that holds an expert's number."""
    names = ("num_experts", "n_routed_experts", "num_local_experts")
    known = [count for name in names if isinstance(count := getattr(config, name, None), int)]
    return torch.uint8 if known and max(known) <= 1 << 8 else torch.uint16


def _end_reason(reason: dict[str, Any]) -> str:
    message = reason.get("message")
    return f"{reason['type']}: {message}" if message else str(reason["type"])
