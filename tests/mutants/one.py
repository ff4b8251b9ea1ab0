"""One mutant through `verify`: `python -m mutants.one CASE`, where PYTHONPATH has the mutated source; prints JSON."""

import json
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

from meshwright.spec.errors import UserError
from meshwright.spec.run import ResolvedRun
from meshwright.testing.proof import prove
from meshwright.testing.ranks import RankPool
from mutants.cases import CASES
from tiny import tiny_run

SECONDS = 60
"""That ranks have for a proof before they are said to hang."""


def build(case: str) -> ResolvedRun:
    """The tiny run of a case."""
    layout, options = CASES[case]
    options = dict(options)
    documents = options.pop("documents", False)
    run = tiny_run(layout, accumulation=3, **options)
    if documents:
        data = run.run.data.model_copy(update={"separate_documents": True})
        run = run.model_copy(update={"run": run.run.model_copy(update={"data": data})})
    return run


def answer(run: ResolvedRun) -> dict[str, Any]:
    """What `verify` says, in short."""
    with tempfile.TemporaryDirectory(prefix="meshwright-mutant-") as folder:
        pool = RankPool()
        try:
            proof = prove(pool, Path(folder), run, timeout=SECONDS)
        except UserError as error:
            return {"result": "refused", "text": str(error)}
        except Exception:
            text = traceback.format_exc()
            return {"result": "hangs" if "no answer within" in text else "fails", "text": text[-1500:]}
        finally:
            pool.close()
    if proof.equal:
        return {"result": "equal", "text": ""}
    location = proof.location
    assert location is not None
    return {"result": "different", "text": f"{location.phase}: {location.name}", "ranks": location.ranks}


if __name__ == "__main__":
    print(json.dumps(answer(build(sys.argv[1]))))
