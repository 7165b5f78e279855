"""The library for trainers that are not async: the same methods and arguments, without ``await``.

    with SyncFleet(["10.0.0.1:7000", "10.0.0.2:7000"]) as fleet:
        trajectory = fleet.generate([1, 2, 3], Sampling(max_new_tokens=64))

        publisher = SyncPublisher(fleet)
        report = publisher.publish(version=1, tensors=model.state_dict()).committed()

A fleet has a thread with an event loop, which watches the servers while the trainer computes. Any
number of threads may use one fleet. Ctrl-C interrupts a call that waits. It also ends the rollout,
turn or announcement for which the call waited, on the servers too.

Async and sync code of one process can share a fleet. ``SyncFleet.submit`` runs a coroutine function
with the ``Fleet`` in its event loop. ``SyncFleet.of`` gives other threads a ``Fleet`` that async
code has opened.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from typing import TYPE_CHECKING, Any, Concatenate, Final, Generic, ParamSpec, Self, TypeVar

from rollwire_client._batches.batcher import Batcher
from rollwire_client._errors import ClosedError
from rollwire_client._fleet.fleet import Fleet
from rollwire_client._fleet.session import Session
from rollwire_client._loop_calls import LoopCalls, LoopThread
from rollwire_client._publishing.publish_handle import PublishHandle
from rollwire_client._publishing.publisher import Publisher
from rollwire_client._rpc.pausing import PAUSED_LEASE

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator, Sequence
    from concurrent.futures import Future

    from rollwire.types import WeightTag

    from rollwire_client._batches.batch import Batch
    from rollwire_client._data import FleetReport, Pause, PublishReport, Require
    from rollwire_client._fleet.session import Conversation

__all__ = ["SyncBatcher", "SyncFleet", "SyncPublishHandle", "SyncPublisher", "SyncSession"]

A = TypeVar("A")
B = TypeVar("B")
R = TypeVar("R")
P = ParamSpec("P")


class _Facade(Generic[A]):
    """An object of the async library, and the event loop that it is used in."""

    def __init__(self, inner: A, loop_thread: LoopCalls) -> None:
        self._inner = inner
        self._loop_thread = loop_thread


def _attribute(name: str, doc: str) -> Any:
    """A property that reads an attribute of the async object."""
    return property(operator.attrgetter(f"_inner.{name}"), doc=doc)


def _blocking(
    method: Callable[Concatenate[A, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[_Facade[A], P], R]:
    """A method that waits for the result of the async one."""

    @functools.wraps(method)
    def call(self: _Facade[A], /, *args: P.args, **named: P.kwargs) -> R:
        return self._loop_thread.call(method(self._inner, *args, **named))

    return call


def _in_loop(
    method: Callable[Concatenate[A, P], R],
) -> Callable[Concatenate[_Facade[A], P], R]:
    """A method that runs the plain one in the loop's thread, so that nothing changes meanwhile."""

    @functools.wraps(method)
    def call(self: _Facade[A], /, *args: P.args, **named: P.kwargs) -> R:
        async def run() -> R:
            return method(self._inner, *args, **named)

        self._loop_thread.check_process()
        try:
            return self._loop_thread.call(run())
        except ClosedError:  # then nothing changes any more
            return method(self._inner, *args, **named)

    return call


def _iterating(
    method: Callable[Concatenate[A, P], AsyncGenerator[R, None]],
) -> Callable[Concatenate[_Facade[A], P], Iterator[R]]:
    """A method that returns an iterator; leaving the iteration closes the async one."""

    @functools.wraps(method)
    def call(self: _Facade[A], /, *args: P.args, **named: P.kwargs) -> Iterator[R]:
        async def begin() -> AsyncGenerator[R, None]:
            return method(self._inner, *args, **named)

        return _each(self._loop_thread, self._loop_thread.call(begin()))

    return call


def _each(loop_thread: LoopCalls, items: AsyncGenerator[R, None]) -> Iterator[R]:
    over: Any = object()

    async def take() -> R:
        return await anext(items, over)

    try:
        while (item := loop_thread.call(take())) is not over:
            yield item
    finally:
        with contextlib.suppress(ClosedError):  # then the iteration has ended with the loop
            loop_thread.call(items.aclose())


def _arguments(
    _: Callable[Concatenate[A, P], None],
) -> Callable[[Callable[Concatenate[B, ...], None]], Callable[Concatenate[B, P], None]]:
    """Gives the decorated ``__init__`` the arguments of another one, for type checkers."""
    return lambda own: own


def _arguments_after_fleet(
    _: Callable[Concatenate[A, Fleet, P], None],
) -> Callable[
    [Callable[Concatenate[B, SyncFleet, ...], None]], Callable[Concatenate[B, SyncFleet, P], None]
]:
    """The same, but the fleet is a ``SyncFleet``."""
    return lambda own: own


class SyncFleet(_Facade[Fleet]):
    """A ``Fleet`` with its event loop; takes the arguments of ``Fleet``.

    It is a context manager that opens and closes both.
    """

    @_arguments(Fleet.__init__)
    def __init__(self, *args: Any, **named: Any) -> None:
        self._thread = LoopThread()
        super().__init__(Fleet(*args, **named), self._thread)

    def __enter__(self) -> Self:
        self._thread.__enter__()
        try:
            self._thread.call(self._inner.__aenter__())
        except BaseException:
            self._thread.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Aborts what is under way, closes the channels and ends the loop. Idempotent."""
        try:
            with contextlib.suppress(ClosedError):
                self._thread.call(self._inner.close())
        finally:
            self._thread.__exit__()

    @staticmethod
    def of(fleet: Fleet) -> SyncFleet:
        """The same fleet, for other threads than that of the event loop in which it is open.

        What is published through either counts for both. Closing this one leaves ``fleet`` open.

        Raises:
            ClosedError: The fleet is not open.
            NotOpenHereError: It was opened in another process.
        """
        return _SharedFleet(fleet)

    def submit(
        self,
        function: Callable[Concatenate[Fleet, P], Coroutine[Any, Any, R]],
        /,
        *args: P.args,
        **named: P.kwargs,
    ) -> Future[R]:
        """Runs ``await function(fleet, …)`` in the fleet's event loop, in the background.

        The function gets the ``Fleet`` itself, which it must not close. It ends with this fleet at
        the latest. It must not block, as rollouts and publishes need the loop too.

        Returns:
            A future. Cancelling it cancels the function. In another event loop, await it with
            ``asyncio.wrap_future``. It raises ClosedError if the fleet or its event loop closes
            before the function has ended.

        Raises:
            ClosedError: The fleet is not open.
        """
        return self._loop_thread.submit(function(self._inner, *args, **named))

    policy: Final[WeightTag | None] = _attribute("policy", "See ``Fleet.policy``.")
    generate = _blocking(Fleet.generate)
    generate_many = _blocking(Fleet.generate_many)
    stream = _iterating(Fleet.stream)
    info = _blocking(Fleet.info)
    newest_version = _blocking(Fleet.newest_version)
    sleep = _blocking(Fleet.sleep)
    wake_up = _blocking(Fleet.wake_up)
    pause = _blocking(Fleet.pause)
    resume = _blocking(Fleet.resume)

    @contextlib.contextmanager
    def paused(
        self, *, lease: float = PAUSED_LEASE, require: Require = "all"
    ) -> Iterator[FleetReport[Pause]]:
        """See ``Fleet.paused``; for a ``with`` block."""
        pausing = self._inner.paused(lease=lease, require=require)
        report = self._loop_thread.call(_wait(pausing.__aenter__))
        try:
            yield report
        finally:
            with contextlib.suppress(ClosedError):  # the lease ends it then
                self._loop_thread.call(_wait(lambda: pausing.__aexit__(None, None, None)))

    def unavailable_reason(self) -> str | None:
        """See ``Fleet.unavailable_reason``; raises ClosedError if the fleet is not open."""

        async def reason() -> str | None:
            return self._inner.unavailable_reason()

        return self._loop_thread.call(reason())

    def session(self, prompt_ids: Sequence[int] = ()) -> SyncSession:
        """See ``Fleet.session``."""
        self._loop_thread.check_process()
        return SyncSession(self._inner.session(prompt_ids), self._loop_thread)


class _SharedFleet(SyncFleet):
    """A fleet that async code has opened and closes."""

    def __init__(self, fleet: Fleet) -> None:
        affinity = fleet._pool.affinity  # noqa: SLF001 - the library's own
        affinity.check_process()
        if affinity.loop is None:
            raise ClosedError("the fleet is not open: use it within `async with`")
        _Facade.__init__(self, fleet, LoopCalls(affinity.loop, affinity))

    def __enter__(self) -> Self:
        return self

    def close(self) -> None:
        self._loop_thread.close()


class SyncSession(_Facade[Session]):
    """A ``Session``; made by ``SyncFleet.session``."""

    id: Final[str] = _attribute("id", "The session's name on the servers.")
    token_ids: Final[tuple[int, ...]] = _attribute(
        "token_ids", "All tokens that were given and sampled so far."
    )
    generate = _blocking(Session.generate)
    stream = _iterating(Session.stream)

    def append(self, token_ids: Sequence[int]) -> None:
        """See ``Session.append``."""
        self._loop_thread.check_process()
        self._inner.append(token_ids)

    rewind = _in_loop(Session.rewind)

    def fork(self) -> SyncSession:
        """See ``Session.fork``."""

        async def fork() -> Session:
            return self._inner.fork()

        return SyncSession(self._loop_thread.call(fork()), self._loop_thread)

    def conversation(self) -> Conversation:
        """See ``Session.conversation``."""
        return self._inner.conversation()


async def _wait(begin: Callable[[], Awaitable[R]]) -> R:
    return await begin()


class SyncPublishHandle(_Facade[PublishHandle]):
    """A publish under way; it continues in the background."""

    version: Final[int | None] = _attribute(
        "version", "The version given to ``SyncPublisher.publish``."
    )
    done: Final[bool] = _attribute("done", "Whether it has ended, with or without success.")
    total_bytes: Final[int] = _attribute(
        "total_bytes", "Bytes that are sent, as in ``PublishReport.bytes``."
    )
    sent_bytes: Final[int] = _attribute("sent_bytes", "Bytes of these that have been received.")
    cancel = _blocking(PublishHandle.cancel)

    def released(self) -> None:
        """Returns when the tensors may change; see ``PublishHandle.released``.

        Raises what ``committed`` raises.
        """
        self._loop_thread.call(_wait(lambda: self._inner.released))

    def committed(self) -> PublishReport:
        """Returns when every server that could has committed.

        Raises:
            PublishError: As ``PublishHandle.committed``.
            ClosedError: It was cancelled.
        """
        return self._loop_thread.call(_wait(lambda: self._inner.committed))


def _publishing(
    method: Callable[Concatenate[A, P], Coroutine[Any, Any, PublishHandle]],
) -> Callable[Concatenate[_Facade[A], P], SyncPublishHandle]:
    wait = _blocking(method)

    @functools.wraps(method)
    def call(self: _Facade[A], /, *args: P.args, **named: P.kwargs) -> SyncPublishHandle:
        return SyncPublishHandle(wait(self, *args, **named), self._loop_thread)

    return call


class SyncPublisher(_Facade[Publisher]):
    """A ``Publisher`` for a ``SyncFleet``; takes the arguments of ``Publisher``."""

    @_arguments_after_fleet(Publisher.__init__)
    def __init__(self, fleet: SyncFleet, **named: Any) -> None:
        inner, loop_thread = fleet._inner, fleet._loop_thread  # noqa: SLF001 - a facade too
        super().__init__(Publisher(inner, **named), loop_thread)

    publish = _publishing(Publisher.publish)
    publish_and_wait = _blocking(Publisher.publish_and_wait)
    schema = _blocking(Publisher.schema)
    prepare = _blocking(Publisher.prepare)
    catch_up = _blocking(Publisher.catch_up)


def _collecting(
    method: Callable[Concatenate[Batcher, P], Coroutine[Any, Any, Batch]],
) -> Callable[Concatenate[SyncBatcher, P], Batch]:
    """A method that keeps a batch which nobody waits for any more, for the next call."""

    @functools.wraps(method)
    def call(self: SyncBatcher, /, *args: P.args, **named: P.kwargs) -> Batch:
        async def collect() -> None:
            if self._unclaimed is None:
                self._unclaimed = await method(self._inner, *args, **named)

        self._loop_thread.call(collect())
        batch, self._unclaimed = self._unclaimed, None
        assert batch is not None  # noqa: S101 - nobody else takes it
        return batch

    return call


class SyncBatcher(_Facade[Batcher]):
    """A ``Batcher`` for a ``SyncFleet``; takes the arguments of ``Batcher``. A context manager.

    ``prompts``, ``reward``, ``decide`` and ``stop`` are called in threads of their own; coroutine
    functions, as ``rollout`` has to be one, run in the fleet's event loop. If Ctrl-C interrupts the
    waiting thread just when a batch is ready, the next ``collect`` returns that batch.
    """

    @_arguments_after_fleet(Batcher.__init__)
    def __init__(self, fleet: SyncFleet, **named: Any) -> None:
        inner, loop_thread = fleet._inner, fleet._loop_thread  # noqa: SLF001 - a facade too
        super().__init__(Batcher(inner, **named), loop_thread)
        self._unclaimed: Batch | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ClosedError):  # with the fleet
            self.close()

    collect = _collecting(Batcher.collect)
    evaluate = _blocking(Batcher.evaluate)
    close = _blocking(Batcher.close)
    save = _in_loop(Batcher.save)
    load = _in_loop(Batcher.load)
    version: Final[int | None] = _attribute("version", "The trainer's step of the latest batch.")
    taken: Final[int] = _attribute("taken", "See ``Batcher.taken``.")
    handed_out: Final[int] = _attribute("handed_out", "Number of groups in batches so far.")
    dropped: Final[int] = _attribute("dropped", "Number of dropped groups so far.")
