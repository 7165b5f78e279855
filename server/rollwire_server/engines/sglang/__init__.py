"""The SGLang engine: its scheduler processes, behind the server's interface."""

from rollwire_server.engines.sglang.engine import SglangEngine
from rollwire_server.engines.sglang.launch import SglangConfig

__all__ = ["SglangConfig", "SglangEngine"]
