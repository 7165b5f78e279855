"""The rollwire rollout server: gRPC services, sequences, weight state, engines."""
