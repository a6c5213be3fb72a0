"""A server in a process of its own: prints its address, ends with its standard input.

Its argument is the longest sequence that the model is made to take.
"""

from __future__ import annotations

import dataclasses
import sys

from safetensors.numpy import load_file
from transformers import AutoTokenizer

from sgljax_engine import Engine, load_model_config
from tests.geometry import SMALL, other
from tests.server.served import FOLDER

if __name__ == "__main__":
    length = int(sys.argv[1])
    geometry = SMALL
    if length > 512:
        geometry = other("one very long context, not eight", num_kv_tokens=length)
    model = dataclasses.replace(load_model_config(FOLDER), context_length=length)
    with Engine(
        model_config=model,
        weights=load_file(FOLDER / "model.safetensors"),
        tokenizer=AutoTokenizer.from_pretrained(FOLDER),
        **geometry,
    ) as engine:
        engine.generate("a", {"max_new_tokens": 1})
        sys.stdout.write(f"{engine.serve(port=0).url}\n")
        sys.stdout.flush()
        sys.stdin.read()
