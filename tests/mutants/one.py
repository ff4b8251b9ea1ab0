"""One run through `verify`, on forked ranks; a mutant's case is one on whose layout its fault shows."""

import tempfile
import traceback
from pathlib import Path
from typing import Any

from meshwright.spec.errors import UserError
from meshwright.spec.run import ResolvedRun
from meshwright.testing.proof import prove
from mutants.cases import CASES
from mutants.forked import ForkedRanks
from tiny import tiny_run


def build(case: str, precision: str = "fp64") -> ResolvedRun:
    """The tiny run of a case; precision `own`: the recipe's."""
    layout, options = CASES[case]
    options = dict(options)
    documents, shrunk, own = options.pop("documents", False), options.pop("shrunk", False), options.pop("own", "bf16")
    run = tiny_run(layout, accumulation=3, precision=own if precision == "own" else precision, **options)
    run = run.model_copy(update={"shrunk": shrunk})
    if documents:
        data = run.run.data.model_copy(update={"separate_documents": True})
        run = run.model_copy(update={"run": run.run.model_copy(update={"data": data})})
    return run


def answer_case(case: str, precision: str = "fp64") -> dict[str, Any]:
    """`verify`'s result for a case: under fp64, by its default options, which also check the recipe's precision."""
    return answer(build(case, precision), build(case, "own") if precision == "fp64" else None)


def answer(run: ResolvedRun, own: ResolvedRun | None = None) -> dict[str, Any]:
    """`verify`'s result, in short."""
    ranks = ForkedRanks(run.run.layout.world_size)
    with tempfile.TemporaryDirectory(prefix="meshwright-mutant-") as folder:
        try:
            proof = prove(ranks, Path(folder), run, own=own)  # type: ignore[arg-type]
        except UserError as error:
            return {"result": "refused", "text": str(error)}
        except Exception:
            text = traceback.format_exc()
            return {"result": "hangs" if "no answer within" in text else "fails", "text": text[-1500:]}
        finally:
            ranks.close()
    if proof.equal:
        return {"result": "equal", "text": ""}
    location = proof.location
    assert location is not None
    return {"result": "different", "text": f"{location.phase}: {location.name}", "ranks": location.ranks}
