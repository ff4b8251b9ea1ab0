"""Derives splits, cuts, contexts and experts in a process of its own: `python -m meshwright.derive`.

Reads {"foreign": a `ForeignModel`, "wanted": numbers} from standard input: -1 asks for the `ForeignExperts`, 0 for the
`ForeignCuts`, 1 for the `ForeignContext`, a larger number for the `ForeignSplit` over this many ranks. Writes a list
with a {"derived": ...} or {"problem": one sentence} for each to standard output.
"""

import contextlib
import json
import sys
import warnings
from collections.abc import Iterable

import torch

from meshwright.derive.probe import derived_context, derived_cuts, derived_experts, derived_split
from meshwright.families.derived import CONTEXT, CUTS, EXPERTS
from meshwright.spec.errors import UserError
from meshwright.spec.foreign import ForeignModel

DERIVATIONS = {EXPERTS: derived_experts, CUTS: derived_cuts, CONTEXT: derived_context}


def answers_to(foreign: ForeignModel, wanted: Iterable[int]) -> list[dict[str, object]]:
    """The answer to each number."""
    answers: list[dict[str, object]] = []
    for number in wanted:
        try:
            derived = DERIVATIONS[number](foreign) if number in DERIVATIONS else derived_split(foreign, number)
            answers.append({"derived": derived.model_dump(mode="json")})
        except UserError as error:
            answers.append({"problem": str(error)})
    return answers


def main() -> None:
    """Answer one question."""
    question = json.load(sys.stdin)
    warnings.simplefilter("ignore")  # transformers', about a model that is not the user's
    torch.set_num_threads(1)  # the tensors are tiny
    with contextlib.redirect_stdout(sys.stderr):
        answers = answers_to(ForeignModel.model_validate(question["foreign"]), question["wanted"])
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
