"""Agents that call a tool: conversations of several turns, and what a trainer learns from them.

    rollwire-server --model builtin:tiny --listen 127.0.0.1:50051 --log-level warning &
    python examples/agent.py

The tool is a toy: a token below 64 asks for its square, and the tool answers with two tokens. The
loop is real. Everything is token ids: sampled tokens are never converted to text and back, so the
trainer sees exactly the tokens that were sampled.
"""

import argparse
import asyncio

from rollwire_client import Conversation, FinishReason, Fleet, Sampling

CALLS = range(64)  # tokens that call the tool
TURNS = 6


def tool(token: int) -> list[int]:
    """What the policy reads next."""
    return [token**2 // 512, token**2 % 512]


async def converse(fleet: Fleet, prompt: list[int], seed: int) -> Conversation:
    """Samples turn after turn until one ends without a call."""
    session = fleet.session(prompt)
    for turn in range(TURNS):
        sampling = Sampling(
            max_new_tokens=32,
            stop_token_ids=CALLS,
            seed=seed * TURNS + turn,  # two turns with one seed would make the same draws
        )
        finish = (await session.generate(sampling)).finish
        if finish is None or finish.reason is not FinishReason.STOP:
            break
        if finish.stop_token_id in CALLS:
            session.append(tool(finish.stop_token_id))
    return session.conversation()


async def run(servers: list[str], agents: int) -> None:
    """Runs some agents at once and shows what they did."""
    async with Fleet(servers) as fleet:
        conversations = await asyncio.gather(
            *(converse(fleet, [100 + agent, 200, 300], seed=agent) for agent in range(agents))
        )
    for agent, conversation in enumerate(conversations):
        tensors = conversation.to_tensors()  # the mask keeps the tool's tokens out of the loss
        cached = [turn.finish.cached_prompt_tokens for turn in conversation.turns if turn.finish]
        print(
            f"agent {agent}: {len(conversation.turns)} turns, {len(tensors.token_ids)} tokens, "
            f"{int(tensors.mask.sum())} sampled, {sum(cached)} read from the prefix cache"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--servers", nargs="+", default=["127.0.0.1:50051"])
    parser.add_argument("--agents", type=int, default=4)
    options = parser.parse_args()
    asyncio.run(run(options.servers, options.agents))
