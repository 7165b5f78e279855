"""The gRPC services: thin views of the sequences and the weight updates."""
