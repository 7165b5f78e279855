"""One rollout server over gRPC: channels, calls, streams, and the messages on them."""
