"""verl's client of LLM servers, for conversations and versions as rollwire has them."""

from __future__ import annotations

from typing import Any, Self

from verl.experimental.agent_loop import AgentLoopManager
from verl.workers.rollout.llm_server import LLMServerClient


class RollwireServerClient(LLMServerClient):
    """Sends the turns of a conversation to the same server, as long as that is not clearly busier
    than the others, and keeps the oldest and the newest version of each sequence.

    Sequences that an update interrupts are resumed by rollwire, so that verl's
    ``FullyAsyncLLMServerClient`` has nothing to resume.
    """

    @classmethod
    def of(cls, client: LLMServerClient) -> Self:
        """A client of the same servers."""
        return cls(client.config, client._load_balancer)  # noqa: SLF001 - verl has no other way

    def _vllm_request_id(self, request_id: str) -> str:
        return request_id  # verl's own clients give each turn a new one


class RollwireAgentLoopManager(AgentLoopManager):
    """An ``AgentLoopManager`` whose agents use ``RollwireServerClient``:
    ``actor_rollout_ref.rollout.agent.agent_loop_manager_class``.
    """

    def __init__(self, config: Any, llm_client: LLMServerClient, *args: Any, **named: Any) -> None:
        super().__init__(config, RollwireServerClient.of(llm_client), *args, **named)
