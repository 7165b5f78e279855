"""Version 1 of the rollwire API, made from the .proto files by ``scripts/generate_protos.py``."""
