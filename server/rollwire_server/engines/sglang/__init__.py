"""The SGLang engine: its scheduler processes, behind the server's interface."""

from .config import SglangConfig
from .engine import SglangEngine

__all__ = ["SglangConfig", "SglangEngine"]
