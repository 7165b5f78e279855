"""The trainer's side of rollwire: stream rollouts from a fleet of servers, publish weights to it.

    async with Fleet(["10.0.0.1:7000", "10.0.0.2:7000"]) as fleet:
        trajectory = await fleet.generate([1, 2, 3], Sampling(max_new_tokens=64))

        publisher = Publisher(fleet)
        handle = await publisher.publish(version=1, tensors=model.state_dict())
        report = await handle.committed

Importing it needs no torch; publishing and tensors do (``pip install 'rollwire[transport]'``).
"""

from rollwire.reasons import ErrorScope
from rollwire.types import (
    CommittedUpdate,
    Finish,
    FinishReason,
    KvPolicy,
    LogprobBasis,
    ServerState,
    SleepingWeights,
    WeightTag,
)

from rollwire_client._batches.batch import (
    Batch,
    Carry,
    Decision,
    Drop,
    DropReason,
    Evaluation,
    Group,
    Part,
    Progress,
    Prompt,
    Sample,
    Tail,
)
from rollwire_client._batches.batcher import Batcher
from rollwire_client._batches.group_file import append_groups, read_groups
from rollwire_client._data import (
    Aborted,
    ActivePause,
    Asleep,
    DtypeCast,
    FleetReport,
    Pause,
    PublishReport,
    PublishTimeouts,
    Resumed,
    Sampling,
    ServerInfo,
    ServerReport,
)
from rollwire_client._detokenizer import Detokenizer
from rollwire_client._errors import (
    BufferFileError,
    CallbackError,
    ClosedError,
    DigestMismatchError,
    FleetCallError,
    FrozenError,
    GroupFileError,
    InvalidRequestError,
    MissingDependencyError,
    NotFiniteError,
    NotOpenHereError,
    PrefixMismatchError,
    ProtocolError,
    PublishError,
    PublishFailedError,
    PublishIncompleteError,
    PublishInProgressError,
    QueueFullError,
    RefusedError,
    RolloutFailedError,
    RollwireError,
    SchemaMismatchError,
    ServerFailedError,
    ServerNotReadyError,
    ServerUnreachableError,
    SourceError,
    StaleAttemptError,
    StalenessError,
    StalePublisherError,
    StepFailedError,
    TensorsChangedError,
    TimedOutError,
    TransferError,
    UnavailableError,
    UpdateRefusedError,
    WeightVersionError,
)
from rollwire_client._fleet.fleet import Fleet
from rollwire_client._fleet.rollout import Retries
from rollwire_client._fleet.session import Conversation, Session
from rollwire_client._publishing.publish_handle import PublishHandle
from rollwire_client._publishing.publisher import Publisher
from rollwire_client._publishing.sharded.ranks import Ranks
from rollwire_client._routing_replay import Routing, RoutingReplay, RoutingSegment
from rollwire_client._rpc.channel import Credentials
from rollwire_client._rpc.client import RolloutClient
from rollwire_client._rpc.conversion import RolloutOptions
from rollwire_client._rpc.timeouts import Timeouts
from rollwire_client._trajectory import Chunk, Segment, Trajectory, TrajectoryTensors

__all__ = [
    "Aborted",
    "ActivePause",
    "Asleep",
    "Batch",
    "Batcher",
    "BufferFileError",
    "CallbackError",
    "Carry",
    "Chunk",
    "ClosedError",
    "CommittedUpdate",
    "Conversation",
    "Credentials",
    "Decision",
    "Detokenizer",
    "DigestMismatchError",
    "Drop",
    "DropReason",
    "DtypeCast",
    "ErrorScope",
    "Evaluation",
    "Finish",
    "FinishReason",
    "Fleet",
    "FleetCallError",
    "FleetReport",
    "FrozenError",
    "Group",
    "GroupFileError",
    "InvalidRequestError",
    "KvPolicy",
    "LogprobBasis",
    "MissingDependencyError",
    "NotFiniteError",
    "NotOpenHereError",
    "Part",
    "Pause",
    "PrefixMismatchError",
    "Progress",
    "Prompt",
    "ProtocolError",
    "PublishError",
    "PublishFailedError",
    "PublishHandle",
    "PublishInProgressError",
    "PublishIncompleteError",
    "PublishReport",
    "PublishTimeouts",
    "Publisher",
    "QueueFullError",
    "Ranks",
    "RefusedError",
    "Resumed",
    "Retries",
    "RolloutClient",
    "RolloutFailedError",
    "RolloutOptions",
    "RollwireError",
    "Routing",
    "RoutingReplay",
    "RoutingSegment",
    "Sample",
    "Sampling",
    "SchemaMismatchError",
    "Segment",
    "ServerFailedError",
    "ServerInfo",
    "ServerNotReadyError",
    "ServerReport",
    "ServerState",
    "ServerUnreachableError",
    "Session",
    "SleepingWeights",
    "SourceError",
    "StaleAttemptError",
    "StalePublisherError",
    "StalenessError",
    "StepFailedError",
    "Tail",
    "TensorsChangedError",
    "TimedOutError",
    "Timeouts",
    "Trajectory",
    "TrajectoryTensors",
    "TransferError",
    "UnavailableError",
    "UpdateRefusedError",
    "WeightTag",
    "WeightVersionError",
    "append_groups",
    "read_groups",
]
