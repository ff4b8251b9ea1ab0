"""One request of the planner's page, answered: in a browser tab, where Pyodide runs this, and by a server."""

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from meshwright.families import PRESETS
from meshwright.families.hub import HUB_ID
from meshwright.imports.recipe import import_files
from meshwright.planner.page import plan_body, planned_about, planned_title
from meshwright.planner.query import TOP, Planned, Query, answer, as_json, find_recipe
from meshwright.planner.sensitivity import Progress
from meshwright.predict.candidate import MARGIN
from meshwright.spec.cluster import parse_cluster_name
from meshwright.spec.errors import UserError
from meshwright.spec.run import Run
from meshwright.storage.opening import read_data, read_text

IN_A_TAB = sys.platform == "emscripten"
MOST_FILES, MOST_CLUSTERS = 8, 16
"""Files and clusters of one request."""
LONGEST_NAME, LONGEST_WORDS = 200, 10_000
"""Bytes of a name, and characters of all words together: a setting in many brackets takes minutes to read."""
RECIPE = "run.yaml"
"""The name that a recipe from a dropped file gets."""


@dataclass(frozen=True)
class PageRequest:
    """What the page asks, checked."""

    model: str
    words: tuple[str, ...] = ()
    clusters: tuple[str, ...] = ()
    files: dict[str, str] = field(default_factory=dict)
    """Name -> text of files that were dropped onto the page."""
    margin: float = MARGIN
    top: int = TOP
    consider: str = ""
    methods: bool = False
    page: bool = True
    """Whether the page is wanted beside the JSON."""

    @classmethod
    def read(cls, text: str | bytes) -> "PageRequest":
        """A request from JSON. Raises `UserError` if it is none."""
        try:
            values: dict[str, Any] = json.loads(text)
            json.dumps(values, ensure_ascii=False).encode()  # half a character is no text
        except RecursionError as error:
            raise UserError("the request is nested too deeply") from error
        except ValueError as error:
            raise UserError("the request is not JSON") from error
        if not isinstance(values, dict) or not values.keys() <= cls.__annotations__.keys():
            raise UserError(f"a request is an object with {', '.join(cls.__annotations__)}")
        for name, kind in KINDS.items():
            if name in values and not isinstance(values[name], kind):
                raise UserError(f"{name}: {values[name]!r} is of another kind")
        for name in ("words", "clusters"):
            values[name] = tuple(map(str, values.get(name, ())))
        files = {_file_name(name): str(content) for name, content in values.get("files", {}).items()}
        values["margin"] = float(f"{values.get('margin', MARGIN)}")  # infinite if it is larger than a float
        request = cls(**{**values, "files": files, "model": values.get("model", "")})
        request.check(len(values.get("files", ())))
        return request

    def check(self, files: int) -> None:
        """Raise `UserError` if it has more, or larger, parts than a training job has; `files`: how many it came
        with."""
        if files > MOST_FILES:
            raise UserError(f"{files} files; one training job has at most {MOST_FILES}")
        if files > len(self.files):
            raise UserError("two of the files have the same name; rename one")
        if len(self.clusters) > MOST_CLUSTERS:
            raise UserError(f"{len(self.clusters)} clusters; compare at most {MOST_CLUSTERS}")
        if sum(map(len, (*self.words, *self.clusters))) > LONGEST_WORDS:
            raise UserError(f"settings and clusters of more than {LONGEST_WORDS:,} characters; put them into a recipe")
        if not self.files and not self.model:
            raise UserError("no model; name one, or drop a file onto the page")
        if max(len(name.encode()) for name in (self.model, *self.clusters)) > LONGEST_NAME:
            raise UserError(f"the name of a model or cluster has more than {LONGEST_NAME} bytes")


KINDS: dict[str, type | tuple[type, ...]] = {
    "model": str,
    "words": list,
    "clusters": list,
    "files": dict,
    "margin": (int, float),
    "top": int,
    "consider": str,
    "methods": bool,
    "page": bool,
}


def _file_name(name: str) -> str:
    """The last part of a dropped file's name. Raises `UserError` if it names no file."""
    last = Path(name).name
    if last in ("", "..") or "\0" in last or len(last.encode()) > LONGEST_NAME:
        raise UserError(f"{name[:LONGEST_NAME]!r} is no name of a file")
    return last


def respond(text: str | bytes, progress: Progress = lambda share, what: None) -> str:
    """The answer to a request as JSON: the text that `plan --json` prints, and the parts of the page; or the problems,
    one line each."""
    try:
        return json.dumps(_answer(PageRequest.read(text), progress))
    except UserError as error:
        return json.dumps({"problems": [" ".join(str(error).split())]})


def _answer(request: PageRequest, progress: Progress) -> dict[str, Any]:
    _check(request)
    with TemporaryDirectory() as name:
        try:
            return _planned(request, Path(name), progress)
        except UserError as error:  # without the name of a folder that nobody knows
            problems = getattr(error, "problems", None) or [" ".join(str(error).split())]
            return {"problems": [problem.replace(f"{name}/", "") for problem in problems]}


def _planned(request: PageRequest, folder: Path, progress: Progress) -> dict[str, Any]:
    """The answer to a request whose files are put into `folder`."""
    progress(0.05, "reading")
    what, notes = _opened(request, folder)
    query = Query(
        what,
        request.words,
        request.clusters,
        top=request.top,
        margin=request.margin,
        consider=request.consider,
        methods=request.methods,
    )
    query.check()
    recipe, base_dir = find_recipe(what, request.words, folder)
    _check_names(recipe.model.name or "", request.clusters or (recipe.cluster,))
    if recipe.layout.schedule.endswith(".csv"):
        raise UserError(f"{recipe.layout.schedule}: the page reads no file of this machine; name a schedule")
    if IN_A_TAB and "local" in (request.clusters or (recipe.cluster,)):
        raise UserError("cluster local: a browser tab does not know its machine; name a cluster, as in 8xh100")
    progress(0.1, "searching layouts")
    planned = answer(query, recipe, base_dir)
    result: dict[str, Any] = {"json": json.dumps(as_json(planned), indent=2), "notes": notes}
    result["sequence"], result["batch"] = recipe.data.sequence_length, planned[0].facts["sequences_per_step"]
    result["precision"] = recipe.training.precision
    return result | (_page(planned, progress) if request.page else {})


def _page(planned: Sequence[Planned], progress: Progress) -> dict[str, str]:
    def later(share: float, what: str) -> None:
        progress(0.6 + 0.4 * share, what)

    body = "\n".join(plan_body(planned, later))
    return {"title": planned_title(planned), "about": planned_about(planned), "body": body}


def _check(request: PageRequest) -> None:
    """Raise `UserError` for names of files."""
    if not request.files and HUB_ID.fullmatch(request.model) and IN_A_TAB:
        raise UserError(
            f"{request.model}: a browser tab has no cache of models; drop the model's config.json onto the page"
        )
    _check_names(request.model, request.clusters)


def _check_names(model: str, clusters: Sequence[str]) -> None:
    """Raise `UserError` for names of files: a page reads none but those that are dropped onto it. On a machine of many
    people, each of them can ask the server."""
    if (Path(model).name != model or model == "..") and not HUB_ID.fullmatch(model):
        raise UserError(f"{model}: the page reads no file of this machine; drop it onto the page")
    for cluster in clusters:
        if Path(cluster).suffix in (".yaml", ".yml", ".json"):
            raise UserError(f"{cluster}: the page reads no file of this machine; name a cluster, as in 8xh100")
        for part in cluster.split("+") if cluster != "local" else ():
            parse_cluster_name(part)


def _opened(request: PageRequest, folder: Path) -> tuple[str, list[str]]:
    """The recipe or model to plan, from the files if there are any, and what they leave open."""
    if not request.files:
        return request.model, []
    paths = [folder / name for name in request.files]
    for path, text in zip(paths, request.files.values(), strict=True):
        path.write_text(text, encoding="utf-8")
    return _read(request, paths)


def _read(request: PageRequest, paths: list[Path]) -> tuple[str, list[str]]:
    if len(paths) == 1 and (data := _data(paths[0])) is not None:
        if isinstance(data.get("model_type"), str):
            return _model_folder(paths[0], data["model_type"]), []
        if "model" in data and data.keys() <= Run.model_fields.keys():
            return paths[0].name, []
    try:
        text, reading = import_files(paths)
    except UserError:
        if request.model not in PRESETS:
            raise
        text, reading = import_files(paths, model=request.model)
    (paths[0].parent / RECIPE).write_text(text, encoding="utf-8")
    assumed = [f"assumed: {note}" for note in reading.notes]
    return RECIPE, [*assumed, *(f"no counterpart: {origin}: {reason}" for origin, reason in reading.without)]


def _data(path: Path) -> dict[str, Any] | None:
    """A file's mapping; None if it holds something else."""
    if path.suffix not in (".json", ".yaml", ".yml"):
        return None
    data = read_data(path, read_text(path))
    return data if isinstance(data, dict) else None


def _model_folder(path: Path, kind: str) -> str:
    """A Hugging Face directory with nothing but this config.json; returns its name, which is no preset's."""
    folder = path.parent / f"{re.sub(r'[^A-Za-z0-9_.-]', '', Path(kind).name)[:40] or 'model'}-config"
    folder.mkdir()
    path.rename(folder / "config.json")
    return folder.name
