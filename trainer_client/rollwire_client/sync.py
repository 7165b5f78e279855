"""The library for trainers that are not async: the same names and arguments, without ``await``.

    with SyncFleet(["10.0.0.1:7000", "10.0.0.2:7000"]) as fleet:
        trajectory = fleet.generate([1, 2, 3], Sampling(max_new_tokens=64))

        publisher = SyncPublisher(fleet)
        report = publisher.publish(version=1, tensors=model.state_dict()).committed()

A fleet owns a thread with an event loop, which looks after the servers while the trainer computes.
Any number of threads may use one fleet. What waits can be interrupted: Ctrl-C ends the rollout, the
turn or the announcement that was waited for, on the servers too.
"""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, Self, TypeVar

from rollwire_client._batches.batcher import Batcher
from rollwire_client._concurrency.loop_thread import LoopThread
from rollwire_client._errors import ClosedError
from rollwire_client._fleet.fleet import Fleet
from rollwire_client._fleet.session import Session
from rollwire_client._publishing.publish_handle import PublishHandle
from rollwire_client._publishing.publisher import Publisher

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Sequence

    from rollwire.types import WeightTag

    from rollwire_client._batches.batch import Batch
    from rollwire_client._fleet.session import Conversation
    from rollwire_client._publishing.publish_handle import PublishReport

__all__ = ["SyncBatcher", "SyncFleet", "SyncPublishHandle", "SyncPublisher", "SyncSession"]

A = TypeVar("A")
B = TypeVar("B")
R = TypeVar("R")
S = TypeVar("S")
P = ParamSpec("P")


class _Facade(Generic[A]):
    """What is used from outside the loop, and the loop."""

    def __init__(self, inner: A, background: LoopThread) -> None:
        self._inner = inner
        self._background = background


def _waits(
    method: Callable[Concatenate[A, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[_Facade[A], P], R]:
    """The same method of the facade, which returns what the other has when it is awaited."""

    @functools.wraps(method)
    def call(self: _Facade[A], /, *args: P.args, **named: P.kwargs) -> R:
        return self._background.call(method(self._inner, *args, **named))

    return call


def _runs(
    method: Callable[Concatenate[A, P], R],
) -> Callable[Concatenate[_Facade[A], P], R]:
    """The same method of the facade, run in the loop's thread."""

    @functools.wraps(method)
    def call(self: _Facade[A], /, *args: P.args, **named: P.kwargs) -> R:
        async def run() -> R:
            return method(self._inner, *args, **named)

        self._background.check()
        try:
            return self._background.call(run())
        except ClosedError:  # nothing else uses it any more
            return method(self._inner, *args, **named)

    return call


def _iterates(
    method: Callable[Concatenate[A, P], AsyncGenerator[R, None]],
) -> Callable[Concatenate[_Facade[A], P], Iterator[R]]:
    """The same method of the facade, for a plain ``for``; leaving it closes the other's."""

    @functools.wraps(method)
    def call(self: _Facade[A], /, *args: P.args, **named: P.kwargs) -> Iterator[R]:
        async def begin() -> AsyncGenerator[R, None]:
            return method(self._inner, *args, **named)

        return _each(self._background, self._background.call(begin()))

    return call


def _each(background: LoopThread, items: AsyncGenerator[R, None]) -> Iterator[R]:
    over: Any = object()

    async def take() -> R:
        return await anext(items, over)

    try:
        while (item := background.call(take())) is not over:
            yield item
    finally:
        with contextlib.suppress(ClosedError):  # by whose end it has ended
            background.call(items.aclose())


def _as(
    method: Callable[Concatenate[A, P], Coroutine[Any, Any, R]],
) -> Callable[[Callable[Concatenate[B, ...], R]], Callable[Concatenate[B, P], R]]:
    """The decorated method has the arguments of the given one."""

    def decorate(own: Callable[Concatenate[B, ...], R]) -> Callable[Concatenate[B, P], R]:
        return functools.wraps(method)(own)

    return decorate


def _takes(
    _: Callable[Concatenate[A, P], None],
) -> Callable[[Callable[Concatenate[B, ...], None]], Callable[Concatenate[B, P], None]]:
    """The decorated ``__init__`` has the arguments of the given one."""
    return lambda own: own


def _takes_after_fleet(
    _: Callable[Concatenate[A, Fleet, P], None],
) -> Callable[
    [Callable[Concatenate[B, SyncFleet, ...], None]], Callable[Concatenate[B, SyncFleet, P], None]
]:
    """The same, but its fleet is a ``SyncFleet``."""
    return lambda own: own


class SyncFleet(_Facade[Fleet]):
    """A ``Fleet`` with its event loop; a context manager that opens and closes both.

    It is made with the arguments of ``Fleet``.
    """

    @_takes(Fleet.__init__)
    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(Fleet(*args, **named), LoopThread())

    def __enter__(self) -> Self:
        self._background.__enter__()
        try:
            self._background.call(self._inner.__aenter__())
        except BaseException:
            self._background.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Aborts what is under way, closes the channels and ends the loop. Idempotent."""
        try:
            with contextlib.suppress(ClosedError):
                self._background.call(self._inner.close())
        finally:
            self._background.__exit__()

    generate = _waits(Fleet.generate)
    stream = _iterates(Fleet.stream)
    info = _waits(Fleet.info)
    newest_version = _waits(Fleet.newest_version)
    unavailable_reason = _runs(Fleet.unavailable_reason)

    @property
    def policy(self) -> WeightTag | None:
        """See ``Fleet.policy``."""
        return self._inner.policy

    def session(self, prompt_ids: Sequence[int] = ()) -> SyncSession:
        """See ``Fleet.session``."""
        self._background.check()
        return SyncSession(self._inner.session(prompt_ids), self._background)


class SyncSession(_Facade[Session]):
    """A ``Session``; made by ``SyncFleet.session``."""

    generate = _waits(Session.generate)
    stream = _iterates(Session.stream)

    @property
    def id(self) -> str:
        """Its name on the servers."""
        return self._inner.id

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All that was given and sampled so far."""
        return self._inner.token_ids

    def append(self, token_ids: Sequence[int]) -> None:
        """See ``Session.append``."""
        self._background.check()
        self._inner.append(token_ids)

    def conversation(self) -> Conversation:
        """See ``Session.conversation``."""
        return self._inner.conversation()


class SyncPublishHandle(_Facade[PublishHandle]):
    """A publish under way, which goes on by itself."""

    @property
    def version(self) -> int | None:
        """As given to ``SyncPublisher.publish``."""
        return self._inner.version

    @property
    def done(self) -> bool:
        """Whether it has ended, one way or another."""
        return self._inner.done

    @property
    def total_bytes(self) -> int:
        """What each server gets."""
        return self._inner.total_bytes

    @property
    def sent_bytes(self) -> int:
        """What all of them have."""
        return self._inner.sent_bytes

    def released(self) -> None:
        """Returns when every server has everything, verified: the tensors may change again.

        Raises what ``committed`` raises.
        """

        async def wait() -> None:
            await self._inner.released

        self._background.call(wait())

    def committed(self) -> PublishReport:
        """Returns when every server that could has committed.

        Raises:
            PublishError: As ``PublishHandle.committed``.
            ClosedError: It was cancelled.
        """

        async def wait() -> PublishReport:
            return await self._inner.committed

        return self._background.call(wait())

    cancel = _waits(PublishHandle.cancel)


def _begins(
    method: Callable[Concatenate[A, P], Coroutine[Any, Any, PublishHandle]],
) -> Callable[Concatenate[_Facade[A], P], SyncPublishHandle]:
    wait = _waits(method)

    @functools.wraps(method)
    def call(self: _Facade[A], /, *args: P.args, **named: P.kwargs) -> SyncPublishHandle:
        return SyncPublishHandle(wait(self, *args, **named), self._background)

    return call


class SyncPublisher(_Facade[Publisher]):
    """A ``Publisher`` for a ``SyncFleet``, made with the arguments of ``Publisher``."""

    @_takes_after_fleet(Publisher.__init__)
    def __init__(self, fleet: SyncFleet, **named: Any) -> None:
        inner, background = fleet._inner, fleet._background  # noqa: SLF001 - a facade too
        super().__init__(Publisher(inner, **named), background)

    publish = _begins(Publisher.publish)
    schema = _waits(Publisher.schema)
    prepare = _waits(Publisher.prepare)
    catch_up = _waits(Publisher.catch_up)


class SyncBatcher(_Facade[Batcher]):
    """A ``Batcher`` for a ``SyncFleet``, made with the arguments of ``Batcher``; a context manager.

    What it is given to call (``prompts``, ``reward``, ``decide``, ``stop``) it calls in threads of
    its own, coroutine functions in the fleet's. A batch that was ready when the waiting thread was
    interrupted, as by Ctrl-C, is what the next ``collect`` returns.
    """

    @_takes_after_fleet(Batcher.__init__)
    def __init__(self, fleet: SyncFleet, **named: Any) -> None:
        inner, background = fleet._inner, fleet._background  # noqa: SLF001 - a facade too
        super().__init__(Batcher(inner, **named), background)
        self._unclaimed: Batch | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ClosedError):  # with the fleet
            self.close()

    @_as(Batcher.collect)
    def collect(self, *args: Any, **named: Any) -> Batch:
        """See ``Batcher.collect``."""

        async def collect() -> None:
            if self._unclaimed is None:
                self._unclaimed = await self._inner.collect(*args, **named)

        self._background.call(collect())
        batch, self._unclaimed = self._unclaimed, None
        assert batch is not None  # noqa: S101 - nobody else takes it
        return batch

    evaluate = _waits(Batcher.evaluate)
    close = _waits(Batcher.close)
    save = _runs(Batcher.save)
    load = _runs(Batcher.load)

    @property
    def version(self) -> int | None:
        """The trainer's step of the latest batch."""
        return self._inner.version

    @property
    def taken(self) -> int:
        """See ``Batcher.taken``."""
        return self._inner.taken

    @property
    def handed_out(self) -> int:
        """Groups so far."""
        return self._inner.handed_out

    @property
    def dropped(self) -> int:
        """Groups so far."""
        return self._inner.dropped
