"""The rollwire API: generated protobuf and gRPC code, one subpackage a version."""
