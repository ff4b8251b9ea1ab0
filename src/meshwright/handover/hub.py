"""Push of a trained model to the Hugging Face hub: a proved export with a model card."""

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils import validate_repo_id

from meshwright.checkpoint.manifest import step_of
from meshwright.handover.export import export_trained
from meshwright.handover.receipt import Receipt
from meshwright.serve.trained import TrainedModel
from meshwright.spec.errors import UserError
from meshwright.spec.recipe import dump_recipe
from meshwright.spec.run import ResolvedRun
from meshwright.spec.text import command
from meshwright.trainer.metrics import read_journal

CARD = "README.md"


@dataclass(frozen=True)
class Pushed:
    """The result of a push, or of its dry run."""

    repository: str
    files: dict[str, int]
    """Names and bytes."""
    card: str
    url: str | None
    """Its address; None if nothing was sent."""


@dataclass(frozen=True, kw_only=True)
class Repository:
    """A repository of the hub, as the user describes it."""

    name: str
    """`owner/name`."""
    license: str | None = None
    private: bool = False

    @property
    def model(self) -> str:
        """The name without its owner."""
        return self.name.rpartition("/")[2]


def push_export(
    trained: TrainedModel,
    repository: Repository,
    *,
    dtype: str | None,
    merge: bool,
    dry_run: bool,
    vllm: Path | None = None,
) -> tuple[Pushed, Receipt]:
    """Export the model, prove the export, and push it with its card. `vllm`: see `export_trained`.

    Raises `UserError` if the repository's name is invalid, the export is not proved, or the hub refuses.
    """
    try:
        validate_repo_id(repository.name)
        valid = repository.name.count("/") == 1
    except HFValidationError:
        valid = False
    if not valid:
        raise UserError(f"--hub {repository.name}: is not a repository name; give owner/name")
    with tempfile.TemporaryDirectory(prefix="meshwright-hub-") as folder:
        directory = Path(folder) / repository.model
        receipt = export_trained(trained, directory, dtype=dtype, merge=merge, vllm=vllm)
        return push(directory, model_card(trained, receipt, repository), repository, dry_run=dry_run), receipt


def push(directory: Path, card: str, repository: Repository, *, dry_run: bool) -> Pushed:
    """Push the folder, with its card, as one commit.

    Raises `UserError` if the hub refuses.
    """
    (directory / CARD).write_text(card, encoding="utf-8")
    files = {path.name: path.stat().st_size for path in sorted(directory.iterdir()) if path.is_file()}
    if dry_run:
        return Pushed(repository.name, files, card, None)
    api = HfApi()
    try:
        made = api.create_repo(repository.name, private=repository.private, exist_ok=True)
        api.upload_folder(repo_id=repository.name, folder_path=directory, commit_message="Exported by Meshwright")
    except (HfHubHTTPError, OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"--hub {repository.name}: the hub refuses ({reason}); log in with: hf auth login") from error
    return Pushed(repository.name, files, card, str(made))


def model_card(trained: TrainedModel, receipt: Receipt, repository: Repository) -> str:
    """The model card: a description, usage, the recipe, data and losses, and the receipt."""
    run = trained.run
    head: dict[str, Any] = {"library_name": "transformers", "tags": ["meshwright"]}
    if repository.license is not None:
        head["license"] = repository.license
    if run is not None and run.run.model.weights == "pretrained" and run.run.model.name:
        head["base_model"] = run.run.model.name
    chats = trained.tokenizer.chat_template is not None
    parts = [
        "---\n" + "".join(f"{key}: {json.dumps(value)}\n" for key, value in head.items()) + "---",
        f"# {repository.model}",
        f"A {trained.spec.family} model, {trained.spec.max_positions} tokens of context, stored in {receipt.dtype}; "
        + ("it has a chat template." if chats else "it has no chat template.")
        + (f" License: {repository.license}." if repository.license else " No license was given."),
        "## Use",
        f"```bash\nvllm serve {repository.name} --max-model-len {trained.spec.max_positions}\n"
        f"{command('chat', repository.name)}\n```",
    ]
    if run is not None:
        parts += _training(trained.source, run)
    lines = "\n".join(f"- {line}" for line in receipt.lines())
    parts += ["## Receipt", f"The files were read back, and logits and tokens compared, by:\n\n{lines}"]
    return "\n\n".join(parts) + "\n"


def _training(source: Path, run: ResolvedRun) -> Sequence[str]:
    data = "\n".join(f"- `{each.path}`" for each in run.run.data.sources)
    parts = ["## Data", data, "## Losses"]
    step = step_of(source)
    records = [
        record for record in read_journal(source.parents[1] / "metrics.jsonl") if record.get("step", step + 1) <= step
    ]
    last = {record["kind"]: record for record in records}
    rows = [f"| training, step {last['step']['step']} | {last['step']['loss']:.4f} |"] if "step" in last else []
    if "evaluation" in last:
        rows.append(f"| held out, step {last['evaluation']['step']} | {last['evaluation']['loss']:.4f} |")
    for name, value in last.get("tasks", {}).items():
        if "/" in name and not name.endswith("_stderr"):
            rows.append(f"| {name}, step {last['tasks']['step']} | {value:.4f} |")
    parts.append("\n".join(["| measured | value |", "|---|---|", *rows]) if rows else "None was recorded.")
    parts += ["## Recipe", f"```yaml\n{dump_recipe(run.given or run.run)}```"]
    return parts
