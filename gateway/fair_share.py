"""A limit that several tokens share, so that none of them takes all of it. Pure.

The rule: what a token holds is at most `_SHARE` times what is free (Choudhury and Hahne, "Dynamic queue length
thresholds", 1998). One token alone leaves a fifth to others, each further one a fifth of what is left: whoever comes
always finds room. The only thing that a token holds may take all that is free. Callers without a token are not told
apart.
"""

from __future__ import annotations

from typing import Final

_SHARE: Final = 4


class FairShare:
    """What is used of ``limit``, as a whole and by each token."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self._of_token: dict[str | None, int] = {}

    @property
    def free(self) -> int:
        return self.limit - self.used

    def of_token(self, token: str | None) -> int:
        return self._of_token.get(token, 0)

    def room(self, token: str | None, own: int = 0) -> float:
        """The most that the token may take; ``own``: of what it has, the part of the one that asks."""
        used = self.of_token(token)
        if token is None or used == own:
            return self.free
        return min(self.free, (_SHARE * self.free - used) / (1 + _SHARE))

    def take(self, token: str | None, amount: int) -> None:
        self.used += amount
        self._of_token[token] = self.of_token(token) + amount

    def give(self, token: str | None, amount: int) -> None:
        self.used -= amount
        left = self.of_token(token) - amount
        if left:
            self._of_token[token] = left
        else:
            self._of_token.pop(token, None)
