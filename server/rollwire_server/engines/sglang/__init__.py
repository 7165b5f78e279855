"""The SGLang engine: its scheduler processes, behind the server's interface."""

from rollwire_server.engines.sglang.config import SglangConfig
from rollwire_server.engines.sglang.engine import SglangEngine

__all__ = ["SglangConfig", "SglangEngine"]
