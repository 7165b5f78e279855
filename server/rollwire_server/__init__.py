"""The rollwire rollout server: gRPC services, sequences, weight state, engines."""

from importlib.metadata import version

__version__ = version("rollwire")
