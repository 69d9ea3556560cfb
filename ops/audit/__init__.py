from logferry.ops.audit.command import main
from logferry.ops.audit.proof import audit

__all__ = ["audit", "main"]
