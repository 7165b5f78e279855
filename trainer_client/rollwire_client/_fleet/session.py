"""A conversation: turns that the policy samples, and tokens that the caller appends between them.

    session = fleet.session(prompt_ids)
    while (turn := await session.generate(sampling)).finish.reason is FinishReason.STOP:
        session.append(tokens_of_what_the_tool_said)
    conversation = session.conversation()

Tokens are never converted to text and back: each turn continues from exactly the tokens that were
sampled and appended before.
"""

from __future__ import annotations

import contextlib
import uuid
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Unpack

from rollwire_client._arguments import integer
from rollwire_client._routing_replay import joined
from rollwire_client._rpc.conversion import DEFAULT_SAMPLING, RolloutOptions, checked_token_ids
from rollwire_client._trajectory import (
    Trajectory,
    TrajectoryBuilder,
    TrajectoryTensors,
    shortened,
    tensors,
)

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator, Sequence

    from rollwire_client._data import Sampling
    from rollwire_client._fleet.rollout import Rollout
    from rollwire_client._fleet.server_pool import ServerPool
    from rollwire_client._routing_replay import Routing
    from rollwire_client._trajectory import Chunk


@dataclass(frozen=True, slots=True)
class Conversation:
    """All tokens of a session. All fields except the first and last have one entry per token.

    Attributes:
        session_id: Id of the session on the servers.
        token_ids: Given and sampled tokens, in order.
        logprobs: Log-probability under the policy that sampled the token; 0.0 for given tokens.
        versions: The weight version that sampled the token; None for given tokens, and for weights
            without a version.
        mask: Whether the token was sampled.
        turns: The trajectory of each turn; the prompt of a turn is everything before it.
    """

    session_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int | None, ...]
    mask: tuple[bool, ...]
    turns: tuple[Trajectory, ...]

    @property
    def kv_lags(self) -> tuple[int, ...]:
        """``Trajectory.kv_lags`` of the turns; 0 for given tokens."""
        sampled = iter([lag for turn in self.turns for lag in turn.kv_lags])
        return tuple(next(sampled) if was_sampled else 0 for was_sampled in self.mask)

    @property
    def routing(self) -> Routing | None:
        """The routing of all turns; None if none has any."""
        return joined(turn.routing for turn in self.turns if turn.routing is not None)

    def to_tensors(self) -> TrajectoryTensors:
        """The conversation as tensors, for a loss.

        Raises:
            MissingDependencyError: torch is not installed.
        """
        return tensors(
            self.token_ids, self.logprobs, self.versions, self.kv_lags, self.mask, self.routing
        )


class TurnSettings:
    """How the turns of a session are sampled, as far as the caller does not say."""

    def apply(
        self, sampling: Sampling | None, options: RolloutOptions, turn: tuple[int, ...]
    ) -> tuple[Sampling, RolloutOptions]:
        """``turn`` is another one for each turn of a session and of its forks."""
        del turn
        return sampling or DEFAULT_SAMPLING, options


class Session:
    """A conversation with a fleet, one turn at a time; made by ``Fleet.session``.

    A turn goes to the server whose prefix cache has the conversation, unless that server is clearly
    busier than the others. It is never sampled under older weights than the last turn. After an
    update the conversation is prefilled again.

    However a turn ends, its sampled tokens are part of the conversation, also if it failed, was
    cancelled, or its iteration was left. ``token_ids`` has all tokens.

    A seed fixes the draws of one turn: give each turn its own. ``fork`` and ``rewind`` make trees
    of turns: alternatives from the same beginning, which is prefilled once.

    Attributes:
        id: Id of the session on the servers.
    """

    def __init__(
        self, prompt_ids: Sequence[int], pool: ServerPool, settings: TurnSettings | None = None
    ) -> None:
        self.id = uuid.uuid4().hex
        self._pool = pool
        self._settings = settings or TurnSettings()
        self._place: tuple[int, ...] = ()  # which fork of which fork
        self._forks = self._turns = 0  # begun
        self._so_far = Conversation(self.id, (), (), (), (), ())
        self._rollout: Rollout | None = None  # of the turn that is under way
        self._ended = False  # a batch has it, and it does not change any more
        self.append(prompt_ids)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All tokens that were given and sampled so far."""
        return self._so_far.token_ids

    def append(self, token_ids: Sequence[int]) -> None:
        """Adds tokens that were not sampled, such as a tool's output or the next question.

        Args:
            token_ids: Any sequence of integers, including arrays and tensors of one dimension.

        Raises:
            InvalidRequestError: They are not token ids.
            RuntimeError: A turn is under way, or a batch has the conversation already.
        """
        self._check_changeable()
        given = checked_token_ids(token_ids)
        self._add(given, (0.0,) * len(given), (None,) * len(given), sampled=False)

    def fork(self) -> Session:
        """Another session with the same tokens and turns, which goes its own way from here.

        Its turns go to the same server, which has the prefix, unless that is clearly busier than
        the others.

        Raises:
            RuntimeError: A turn is under way.
        """
        self._check_idle()
        made = Session((), self._pool, self._settings)
        made._so_far = replace(self._so_far, session_id=made.id)
        made._place = (*self._place, self._turns, self._forks)
        self._forks += 1
        self._pool.router.share(self.id, made.id)
        return made

    def rewind(self, position: int) -> None:
        """Drops all tokens from ``position`` on, an index into ``token_ids``; 0 drops all.

        Turns that begin there or later are dropped. Of a turn that began before, the tokens before
        ``position`` stay, without its finish and its text.

        Raises:
            TypeError, ValueError: The conversation has no such position.
            RuntimeError: A turn is under way, or a batch has the conversation already.
        """
        self._check_changeable()
        before = self._so_far
        position = integer("position", position, maximum=len(before.token_ids))
        self._so_far = Conversation(
            self.id,
            before.token_ids[:position],
            before.logprobs[:position],
            before.versions[:position],
            before.mask[:position],
            tuple(
                shortened(turn, position - len(turn.prompt_ids))
                for turn in before.turns
                if len(turn.prompt_ids) < position
                or len(turn.prompt_ids) + len(turn.token_ids) <= position
            ),
        )

    async def generate(
        self, sampling: Sampling | None = None, **options: Unpack[RolloutOptions]
    ) -> Trajectory:
        """Samples the next turn to its end; see ``Fleet.stream`` for errors.

        Args:
            sampling: How to sample; ``max_new_tokens`` counts the tokens of this turn. Default: as
                the batcher whose rollout this is, or ``Sampling()``.
            **options: The options of ``RolloutOptions``, except ``session_id``.

        Raises:
            RuntimeError: A turn is under way, or a batch has the conversation already.
        """
        rollout = self._turn(sampling, options)
        with self._sampling(rollout):
            await rollout.run()
        return self._so_far.turns[-1]

    async def stream(
        self, sampling: Sampling | None = None, **options: Unpack[RolloutOptions]
    ) -> AsyncGenerator[Chunk, None]:
        """Samples the next turn and yields its tokens as they arrive; see ``generate``.

        Leaving the iteration ends the turn. Close the iterator before the next turn, for example
        with ``contextlib.aclosing``.
        """
        rollout = self._turn(sampling, options)
        with self._sampling(rollout):
            async with contextlib.aclosing(rollout.chunks()) as chunks:
                async for chunk in chunks:
                    yield chunk

    def conversation(self) -> Conversation:
        """The conversation so far, without a turn that is under way."""
        return self._so_far

    def _turn(self, sampling: Sampling | None, options: RolloutOptions) -> Rollout:
        self._check_changeable()
        if "session_id" in options:
            raise TypeError("session_id is the session's own: leave it out")
        sampling, options = self._settings.apply(sampling, options, (*self._place, self._turns))
        own: RolloutOptions = {**options, "session_id": self.id}
        sampled = [turn.segments[-1] for turn in self._so_far.turns if turn.segments]
        after = sampled[-1].weights if sampled else None
        return self._pool.rollout(TrajectoryBuilder(self.token_ids, after=after), sampling, own)

    @contextlib.contextmanager
    def _sampling(self, rollout: Rollout) -> Iterator[None]:
        self._rollout = rollout
        self._turns += 1
        try:
            yield
        finally:
            self._rollout = None
            turn = rollout.output.trajectory()
            self._add(turn.token_ids, turn.logprobs, turn.versions, sampled=True, turns=(turn,))

    def _add(
        self,
        token_ids: tuple[int, ...],
        logprobs: tuple[float, ...],
        versions: tuple[int | None, ...],
        *,
        sampled: bool,
        turns: tuple[Trajectory, ...] = (),
    ) -> None:
        before = self._so_far
        self._so_far = Conversation(
            self.id,
            before.token_ids + token_ids,
            before.logprobs + logprobs,
            before.versions + versions,
            before.mask + (sampled,) * len(token_ids),
            before.turns + turns,
        )

    def _check_idle(self) -> None:
        if self._rollout is not None:
            raise RuntimeError("a turn of this session is under way: let it end or cancel it")

    def _check_changeable(self) -> None:
        self._check_idle()
        if self._ended:
            raise RuntimeError(
                "this conversation has ended, as the function that held it has returned or was "
                "cancelled: go on with a fork of it"
            )


def rollout_of(session: Session) -> Rollout | None:
    """The turn that is under way."""
    return session._rollout  # noqa: SLF001 - no business of a session's user


def end(session: Session) -> None:
    """Nothing is added to the conversation any more; no turn may be under way."""
    session._ended = True  # noqa: SLF001 - no business of a session's user
