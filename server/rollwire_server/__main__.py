"""``python -m rollwire_server``: as ``rollwire-server``."""

from rollwire_server.main import main

main()
