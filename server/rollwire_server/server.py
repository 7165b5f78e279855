"""One rollout server: its parts put together, started, drained and stopped."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import signal
import uuid
from typing import TYPE_CHECKING, Any

import rollwire_transport as transport
import structlog
from rollwire.reasons import Reason
from rollwire.types import ServerState
from rollwire.v1 import rollout_pb2_grpc, weights_pb2_grpc

from rollwire_server.counters import ServerCounters
from rollwire_server.endpoints import Endpoints, transport_listen_options
from rollwire_server.engines import create_engine
from rollwire_server.engines.base import EngineError
from rollwire_server.metrics import Metrics
from rollwire_server.rpc.rollout_service import RolloutService
from rollwire_server.rpc.weight_service import WeightService
from rollwire_server.security import TokenAuthorizer
from rollwire_server.sequences.manager import Sequences
from rollwire_server.settings import StartError
from rollwire_server.sleep import SleepController
from rollwire_server.state import StateChange, StateMachine
from rollwire_server.weights.manager import UpdateManager
from rollwire_server.weights.state import WeightState

if TYPE_CHECKING:
    from collections.abc import Iterator

    import grpc

    from rollwire_server.settings import ServerSettings

log = structlog.get_logger()


class EngineDied(Exception):  # noqa: N818  what happened, for an orchestrator to restart
    """The engine died while the server ran."""


class RolloutServer:
    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        self._server_id = uuid.uuid4().hex
        try:
            self._engine = create_engine(settings)
        except EngineError as error:
            raise StartError(str(error)) from error
        self._authorizer = TokenAuthorizer(settings)
        self._listening = transport_listen_options(settings)
        self._counters = ServerCounters()
        self._state = StateMachine(default_pause_lease=settings.pause_lease_seconds)
        self._sequences = Sequences(
            self._engine,
            self._state,
            self._counters,
            max_waiting=settings.max_waiting,
            max_sequence_seconds=settings.max_sequence_seconds,
            engine_died=self._on_engine_died,
        )
        self._stopping = asyncio.Event()
        self._stop_now = asyncio.Event()
        self._failure: Exception | None = None

    async def run(self) -> None:
        """Serves until SIGTERM or SIGINT, then drains; a second signal ends what is left."""
        self._check_ready_file()
        endpoints = Endpoints(self._settings, self._authorizer, self._counters)
        with self._signals():
            async with asyncio.TaskGroup() as tasks:
                updates = UpdateManager(
                    self._engine,
                    self._state,
                    WeightState(self._engine, self._state, self._sequences, self._counters),
                    self._counters,
                    tasks,
                    frozen=self._settings.frozen,
                    bucket_timeout=self._settings.bucket_timeout_seconds,
                    listen=self._listening,
                )
                self._add_services(endpoints.api, updates, tasks)
                metrics = Metrics(
                    self._counters, self._engine, self._state, self._sequences, updates
                )
                background = [
                    tasks.create_task(self._state.run(), name="state"),
                    tasks.create_task(self._sequences.run(), name="sequences"),
                ]
                self._state.observe(lambda state: endpoints.set_ready(ready=state.ready))
                try:
                    await endpoints.start(metrics)
                    await self._load(updates)
                    if not self._stopping.is_set():
                        self._report_ready(endpoints.addresses)
                    await self._stopping.wait()
                    await self._drain(updates)
                except (EngineError, StartError) as error:
                    self._failure = self._failure or StartError(str(error))
                finally:
                    self._remove_ready_file()
                    await endpoints.stop()
                    await self._engine.stop()
                    for task in background:
                        task.cancel()
        if self._failure is not None:
            raise self._failure

    # Starting.

    def _check_ready_file(self) -> None:
        path = self._settings.ready_file
        if path is not None and (path.is_dir() or not path.parent.is_dir()):
            raise StartError(
                f"cannot write the ready file {path}: it is a folder, or its folder does not exist"
            )

    def _add_services(
        self, api: grpc.aio.Server, updates: UpdateManager, tasks: asyncio.TaskGroup
    ) -> None:
        engine, state, sequences = self._engine, self._state, self._sequences
        rollouts = RolloutService(
            self._server_id,
            engine,
            state,
            sequences,
            updates,
            SleepController(engine, state, sequences, updates, tasks),
            self._counters,
            self._authorizer,
            self._settings.max_streams_per_client,
        )
        rollout_pb2_grpc.add_RolloutServiceServicer_to_server(rollouts, api)
        weights_pb2_grpc.add_WeightServiceServicer_to_server(
            WeightService(engine, state, updates), api
        )

    async def _load(self, updates: UpdateManager) -> None:
        log.info("loading", model=self._settings.model)
        weights = await self._engine.start(self._server_id, self._sequences)
        await updates.weights.loaded(weights)
        device = self._engine.describe().device
        await asyncio.to_thread(transport.warm_up, device, self._listening)
        if self._stopping.is_set():  # after a signal, or the engine's death, it never serves
            return
        gc.collect()
        gc.freeze()  # else a full collection walks over all of torch, for a quarter of a second
        self._state.attach(self._engine)
        empty = self._settings.await_weights
        self._state.apply(StateChange.LOADED_EMPTY if empty else StateChange.LOADED)

    def _report_ready(self, addresses: dict[str, str]) -> None:
        engine = self._engine.describe()
        backends = transport.available_backends(self._listening)
        log.info(
            "ready",
            **addresses,
            model=self._settings.model,
            state=self._state.current.value,
            server_id=self._server_id,
            device=str(engine.device),
            staging=engine.staging,
            staging_mib=-(-engine.staging_bytes >> 20),
            transports=[name for name, backend in backends.items() if backend.ok],
        )
        for name, backend in backends.items():
            if not backend.ok:
                log.info("transport not offered", backend=name, why=backend.reason)
        if (path := self._settings.ready_file) is not None:
            ready = {**addresses, "server_id": self._server_id, "pid": os.getpid()}
            partial = path.with_name(path.name + ".partial")
            try:
                partial.write_text(json.dumps(ready) + "\n")
                partial.replace(path)  # whoever waits for the file never reads half of it
            except OSError as error:
                raise StartError(f"cannot write the ready file {path}: {error.strerror}") from error

    def _remove_ready_file(self) -> None:
        if (path := self._settings.ready_file) is not None:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)

    # Stopping.

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        handlers = {
            signal.SIGTERM: self._on_signal,
            signal.SIGINT: self._on_signal,
            signal.SIGHUP: self._on_sighup,
        }
        for number, handler in handlers.items():
            loop.add_signal_handler(number, handler)
        try:
            yield
        finally:
            for number in handlers:
                loop.remove_signal_handler(number)
                signal.signal(number, signal.SIG_IGN)  # it exits already, and with its own code

    def _on_signal(self) -> None:
        if self._stopping.is_set():
            self._stop_now.set()
            return
        self._stopping.set()
        if self._state.current is not ServerState.STARTING:  # else it stops once it has loaded
            self._state.apply(StateChange.DRAIN)

    def _on_sighup(self) -> None:
        if os.isatty(0):  # its terminal was closed
            self._on_signal()
        else:  # a daemon is asked to read its files again
            log.info("SIGHUP: files of TLS and tokens are read again whenever they change")

    def _on_engine_died(self, error: BaseException) -> None:
        explained = isinstance(error, EngineError)  # anything else is a bug
        log.error("the engine died", error=str(error), exc_info=None if explained else error)
        self._failure = EngineDied(str(error))
        self._state.apply(StateChange.DRAIN)
        self._stopping.set()
        self._stop_now.set()

    async def _drain(self, updates: UpdateManager) -> None:
        log.info("draining", live=self._sequences.live, seconds=self._settings.drain_seconds)
        self._state.apply(StateChange.DRAIN)
        discarding = updates.discard_current(Reason.DRAINING, "the server is shutting down")
        waits: list[asyncio.Future[Any]] = [
            asyncio.gather(discarding, self._sequences.wait_idle()),
            asyncio.create_task(self._stop_now.wait()),
        ]
        try:
            await asyncio.wait(
                waits,
                timeout=self._settings.drain_seconds,
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)
        interrupted = await self._sequences.interrupt_all("the server is shutting down")
        log.info("drained", interrupted=interrupted)
