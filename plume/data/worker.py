"""A worker process of prepare: takes pieces on its input, answers with results on its output, until the input ends."""

from __future__ import annotations

import os
import pickle
import signal
import sys

from plume.config import UserError
from plume.data.maker import ShardMaker


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # so that half-written files are taken away
    with os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)  # whatever a library prints must not come between the answers
        try:
            make = ShardMaker(*pickle.load(sys.stdin.buffer))
            while True:
                pickle.dump(make(pickle.load(sys.stdin.buffer)), answers)
                answers.flush()
        except EOFError:
            return
        except UserError as error:
            pickle.dump(error, answers)


if __name__ == "__main__":
    main()
