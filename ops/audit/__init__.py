from logferry.ops.audit.audit import audit
from logferry.ops.audit.command import main

__all__ = ["audit", "main"]
