"""A judge: a frozen server that reads the policy's answers and rates them.

    rollwire-server --model builtin:tiny --listen 127.0.0.1:50051 --log-level warning &
    rollwire-server --model builtin:tiny --listen 127.0.0.1:50061 --log-level warning --frozen &
    python examples/judge.py

The judge is a language model like any other, on servers of its own, which take no updates. It reads
the prompt and the answer, and samples one token a vote: below 256 means "good". Here it is a random
model, so its taste is a toy; the loop is real.
"""

import argparse
import asyncio

from rollwire_client import Fleet, Sampling, Trajectory

VOTES = 8


async def reward(judges: Fleet, answer: Trajectory) -> float:
    """The share of votes that are for it."""
    text = answer.prompt_ids + answer.token_ids  # a real judge's prompt would ask a question too
    votes = await asyncio.gather(
        *(
            judges.generate(
                text,
                Sampling(max_new_tokens=1, seed=vote, temperature=0.1),
                session_id=answer.request_id,  # all votes go to the server that read it
            )
            for vote in range(VOTES)
        )
    )
    return sum(vote.token_ids[0] < 256 for vote in votes) / VOTES


async def judged(
    policy: Fleet, judges: Fleet, prompt: list[int], seed: int
) -> tuple[Trajectory, float]:
    """Samples an answer, and has it judged while others are still being written."""
    answer = await policy.generate(prompt, Sampling(max_new_tokens=24, seed=seed))
    return answer, await reward(judges, answer)


async def run(servers: list[str], judges: list[str], answers: int) -> None:
    """Samples some answers to one prompt and shows their scores."""
    async with Fleet(servers) as policy, Fleet(judges) as jury:
        results = await asyncio.gather(
            *(judged(policy, jury, [1, 2, 3], seed) for seed in range(answers))
        )
    for answer, worth in results:
        print(f"{worth:.3f} for {len(answer.token_ids)} tokens: {answer.token_ids[:8]} …")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--servers", nargs="+", default=["127.0.0.1:50051"])
    parser.add_argument("--judges", nargs="+", default=["127.0.0.1:50061"])
    parser.add_argument("--answers", type=int, default=8)
    options = parser.parse_args()
    asyncio.run(run(options.servers, options.judges, options.answers))
