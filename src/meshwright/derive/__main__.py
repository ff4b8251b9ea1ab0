"""Derives a split or cuts in a process of its own: `python -m meshwright.derive`.

Reads {"kind": "ForeignSplit", "foreign": a `ForeignModel`, "parts": ranks} or {"kind": "ForeignCuts", "foreign": ...}
from standard input, and writes {"derived": of that kind} or {"problem": one sentence} to standard output.
"""

import contextlib
import json
import sys
import warnings

import torch

from meshwright.derive.probe import derived_cuts, derived_split
from meshwright.spec.errors import UserError
from meshwright.spec.foreign import ForeignModel


def main() -> None:
    """Answer one question."""
    question = json.load(sys.stdin)
    warnings.simplefilter("ignore")  # transformers', about a model that is not the user's
    torch.set_num_threads(1)  # the tensors are tiny
    answer: dict[str, object]
    with contextlib.redirect_stdout(sys.stderr):
        try:
            foreign = ForeignModel.model_validate(question["foreign"])
            cuts = question["kind"] == "ForeignCuts"
            derived = derived_cuts(foreign) if cuts else derived_split(foreign, question["parts"])
            answer = {"derived": derived.model_dump(mode="json")}
        except UserError as error:
            answer = {"problem": str(error)}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
