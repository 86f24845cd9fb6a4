"""What llama.cpp makes of a GGUF file, run as a program: python llama_logits.py FILE OUT TOKEN... writes logits to OUT.

It has a process of its own because a crash of llama.cpp must not end ours, and crash it does with 8-bit weights where
gcc 12 built it for a processor with matrix tiles (Intel AMX): gcc drops most of their configuration.
"""

from __future__ import annotations

import sys

import numpy as np


def main(gguf: str, out: str, *tokens: str) -> None:
    import llama_cpp

    silent = llama_cpp.llama_log_callback(lambda *_: None)  # failures still come as exceptions
    llama_cpp.llama_log_set(silent, None)
    llama = llama_cpp.Llama(gguf, n_ctx=len(tokens), logits_all=True, type_k=0, type_v=0, verbose=False)
    llama.eval([int(token) for token in tokens])
    np.save(out, np.array(llama.scores[: len(tokens)]))
    llama.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
