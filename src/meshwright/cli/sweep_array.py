"""A sweep as a scheduler's array: a Slurm script with one task for each trial."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

SCRIPT = "array.sh"
"""The script in the sweep's folder."""


def write_array(folder: Path, commands: Mapping[str, Sequence[str]]) -> Path:
    """Write the script, whose task N runs the Nth command and appends to its run's log; `commands`: by name of the
    run."""
    path, folder = folder / SCRIPT, folder.resolve()
    path.write_text("\n".join(_lines(folder, commands)) + "\n", encoding="utf-8")
    path.chmod(0o755)
    return path


def _lines(folder: Path, commands: Mapping[str, Sequence[str]]) -> list[str]:
    cases = [f"{number}) run={shlex.quote(name)} ;;" for number, name in enumerate(commands, 1)]
    runs = [f"{number}) exec {shlex.join(command)} ;;" for number, command in enumerate(commands.values(), 1)]
    return [
        "#!/bin/bash",
        f"#SBATCH --job-name={folder.name}",
        f"#SBATCH --array=1-{len(commands)}",
        "#SBATCH --nodes=1",
        "#SBATCH --output=/dev/null",
        "# What the machines have is for the command line: sbatch --gpus=8 --time=4:00:00 array.sh",
        "# A task that is started again continues its run from the newest checkpoint.",
        'case "$SLURM_ARRAY_TASK_ID" in',
        *cases,
        '*) echo "no trial $SLURM_ARRAY_TASK_ID" >&2; exit 2 ;;',
        "esac",
        f'exec >> {shlex.quote(str(folder))}/"$run.log" 2>&1',
        'case "$SLURM_ARRAY_TASK_ID" in',
        *runs,
        "esac",
    ]
