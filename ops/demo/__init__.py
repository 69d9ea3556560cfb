from logferry.ops.demo.command import main

__all__ = ["main"]
