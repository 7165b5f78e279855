"""One rollout server: its parts put together, started, drained and stopped."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import uuid
from typing import TYPE_CHECKING

import grpc
import structlog
from google.rpc import error_details_pb2  # noqa: F401  reflection then shows error details
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from rollwire.v1 import rollout_pb2, rollout_pb2_grpc, weights_pb2, weights_pb2_grpc

from rollwire_server.engines.base import EngineError
from rollwire_server.engines.choice import make_engine
from rollwire_server.errors import Reason
from rollwire_server.lifecycle import Event, Lifecycle, State
from rollwire_server.memory import Memory
from rollwire_server.rollouts import Rollouts
from rollwire_server.services.info import ServerInfo
from rollwire_server.services.rollout_service import RolloutService
from rollwire_server.services.weight_service import WeightService
from rollwire_server.updates import Updates

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rollwire_server.settings import ServerSettings

log = structlog.get_logger()

ROLLOUT_SERVICE: str = rollout_pb2.DESCRIPTOR.services_by_name["RolloutService"].full_name
WEIGHT_SERVICE: str = weights_pb2.DESCRIPTOR.services_by_name["WeightService"].full_name
MANIFEST_BYTES = 64 << 20  # the only large message: 10 MiB for 100,000 tensors
FLUSH_SECONDS = 2.0  # for streams to deliver their last messages
READY = {State.SERVING, State.PAUSED}
CHANNEL_OPTIONS = [
    ("grpc.so_reuseport", 0),  # a port in use is an error, not a second server on it
    ("grpc.max_receive_message_length", MANIFEST_BYTES),
    # Clients keep long silent streams alive; do not send them away for it.
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
]


class StartError(Exception):
    """The server cannot start; the message is for a person."""


class EngineDied(Exception):  # noqa: N818  what happened, for an orchestrator to restart
    """The engine died while the server ran."""


class RolloutServer:
    """A server from its first to its last moment: ``await RolloutServer(settings).run()``."""

    def __init__(self, settings: ServerSettings) -> None:
        """Raises StartError when the engine's settings are wrong."""
        self._settings = settings
        self._server_id = uuid.uuid4().hex
        try:
            self._engine = make_engine(settings)
        except EngineError as error:
            raise StartError(str(error)) from error
        self._lifecycle = Lifecycle(default_pause_lease=settings.pause_lease_seconds)
        self._rollouts = Rollouts(
            self._engine,
            self._lifecycle,
            max_waiting=settings.max_waiting,
            max_sequence_seconds=settings.max_sequence_seconds,
            engine_died=self._on_engine_died,
        )
        self._stopping = asyncio.Event()
        self._hurry = asyncio.Event()
        self._failure: Exception | None = None

    async def run(self) -> None:
        """Serves until SIGTERM or SIGINT, then drains; a second signal ends what is left at once.

        Raises StartError when the address cannot be bound or the model cannot be loaded, EngineDied
        when the engine did.
        """
        self._check_ready_file()
        api = grpc.aio.server(options=CHANNEL_OPTIONS)
        address = self._bind(api)
        with self._signals():
            async with asyncio.TaskGroup() as tasks:
                updates = Updates(
                    self._engine,
                    self._lifecycle,
                    self._rollouts,
                    tasks,
                    frozen=self._settings.frozen,
                    bucket_timeout=self._settings.bucket_timeout_seconds,
                )
                health_servicer = self._add_services(api, updates, tasks)
                background = [
                    tasks.create_task(self._lifecycle.run(), name="lifecycle"),
                    tasks.create_task(self._rollouts.run(), name="rollouts"),
                    tasks.create_task(self._tell_health(health_servicer), name="health"),
                ]
                try:
                    await api.start()
                    await self._load(updates)
                    if not self._stopping.is_set():
                        self._announce(address)
                    await self._stopping.wait()
                    await self._drain(updates)
                except (EngineError, StartError) as error:
                    self._failure = StartError(str(error))
                finally:
                    self._retract()
                    await api.stop(FLUSH_SECONDS)
                    await self._engine.stop()
                    for task in background:
                        task.cancel()
        if self._failure is not None:
            raise self._failure

    # Starting.

    def _check_ready_file(self) -> None:
        path = self._settings.ready_file
        if path is not None and (path.is_dir() or not path.parent.is_dir()):
            raise StartError(f"cannot write the ready file {path}: it is a folder, or in none")

    def _bind(self, api: grpc.aio.Server) -> str:
        host = self._settings.listen.rpartition(":")[0]
        try:
            port = api.add_insecure_port(self._settings.listen)
        except RuntimeError as error:
            raise StartError(
                f"cannot listen on {self._settings.listen}: the port is in use, or the address is "
                "not this machine's"
            ) from error
        return f"{host}:{port}"

    def _add_services(
        self, api: grpc.aio.Server, updates: Updates, tasks: asyncio.TaskGroup
    ) -> health.HealthServicer:
        engine, lifecycle, rollouts = self._engine, self._lifecycle, self._rollouts
        memory = Memory(engine, lifecycle, rollouts, updates, tasks)
        info = ServerInfo(self._server_id, engine, lifecycle, rollouts, updates)
        rollout_pb2_grpc.add_RolloutServiceServicer_to_server(
            RolloutService(engine, lifecycle, rollouts, updates, memory, info), api
        )
        weights_pb2_grpc.add_WeightServiceServicer_to_server(
            WeightService(engine, lifecycle, updates), api
        )
        health_servicer = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(health_servicer, api)
        if self._settings.reflection:
            services = (ROLLOUT_SERVICE, WEIGHT_SERVICE, health.SERVICE_NAME)
            reflection.enable_server_reflection((*services, reflection.SERVICE_NAME), api)
        return health_servicer

    async def _load(self, updates: Updates) -> None:
        """Loads the model; calls are answered meanwhile, with STARTING where they need it."""
        log.info("loading", model=self._settings.model)
        weights = await self._engine.start(self._server_id, self._rollouts)
        await updates.loaded(weights)
        self._lifecycle.attach(self._engine)
        awaiting = self._settings.await_weights
        self._lifecycle.happened(Event.LOADED_AWAITING if awaiting else Event.LOADED)

    def _announce(self, address: str) -> None:
        engine = self._engine.describe()
        log.info(
            "ready",
            listen=address,
            model=self._settings.model,
            state=self._lifecycle.state.value,
            server_id=self._server_id,
            device=str(engine.device),
            staging=engine.staging,
            staging_mib=-(-engine.staging_bytes >> 20),
        )
        if (path := self._settings.ready_file) is not None:
            ready = {"listen": address, "server_id": self._server_id, "pid": os.getpid()}
            written = path.with_name(path.name + ".partial")
            try:
                written.write_text(json.dumps(ready) + "\n")
                written.replace(path)  # whoever waits for the file never reads half of it
            except OSError as error:
                raise StartError(f"cannot write the ready file {path}: {error.strerror}") from error

    def _retract(self) -> None:
        """Takes the ready file away: what it names is no more."""
        if (path := self._settings.ready_file) is not None:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)

    async def _tell_health(self, servicer: health.HealthServicer) -> None:
        changed = asyncio.Event()
        self._lifecycle.observe(lambda _: changed.set())
        while True:
            await changed.wait()
            changed.clear()
            ready = self._lifecycle.state in READY
            status = health_pb2.HealthCheckResponse.SERVING
            if not ready:
                status = health_pb2.HealthCheckResponse.NOT_SERVING
            await servicer.set(ROLLOUT_SERVICE, status)

    # Stopping.

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)
                signal.signal(number, signal.SIG_IGN)  # it exits already, and with its own code

    def _on_signal(self) -> None:
        if self._stopping.is_set():
            self._hurry.set()
            return
        self._stopping.set()
        if self._lifecycle.state is not State.STARTING:  # then it goes down once it has loaded
            self._lifecycle.happened(Event.DRAIN)

    def _on_engine_died(self, error: BaseException) -> None:
        log.error("the engine died", error=str(error))
        self._failure = EngineDied(str(error))
        self._lifecycle.happened(Event.DRAIN)
        self._stopping.set()
        self._hurry.set()

    async def _drain(self, updates: Updates) -> None:
        """Lets sequences run to their end, as long as it may take; then they go on elsewhere."""
        log.info("draining", live=self._rollouts.live, seconds=self._settings.drain_seconds)
        self._lifecycle.happened(Event.DRAIN)
        await updates.drop(Reason.DRAINING, "the server goes down")
        idle = asyncio.create_task(self._rollouts.idle())
        hurry = asyncio.create_task(self._hurry.wait())
        try:
            await asyncio.wait(
                [idle, hurry],
                timeout=self._settings.drain_seconds,
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            idle.cancel()
            hurry.cancel()
        interrupted = await self._rollouts.interrupt_all("the server goes down")
        log.info("drained", interrupted=interrupted)
