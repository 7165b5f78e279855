"""The gRPC services: thin views of the rollouts and the weight updates."""
