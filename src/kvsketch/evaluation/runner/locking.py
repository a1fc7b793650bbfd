"""One process writes a results store at a time: a lock that goes with the process that holds it."""

from __future__ import annotations

import os
import sys

#: where the byte lies that is locked on Windows, whose locks keep others from reading, too: beyond
#: everything a store will ever hold
_BEYOND = 1 << 40

if sys.platform == "win32":
    import msvcrt

    def lock(descriptor: int) -> None:
        """Lock an open file. Released when it is closed.

        Raises:
            OSError: another process holds the lock.
        """
        before = os.lseek(descriptor, 0, os.SEEK_CUR)
        os.lseek(descriptor, _BEYOND, os.SEEK_SET)
        try:
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        finally:
            os.lseek(descriptor, before, os.SEEK_SET)

else:
    import fcntl

    def lock(descriptor: int) -> None:
        """Lock an open file. Released when it is closed.

        Raises:
            OSError: another process holds the lock.
        """
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
