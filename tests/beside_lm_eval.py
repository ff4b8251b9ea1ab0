"""lm-evaluation-harness on our model, on transformers' and on our server: equal figures and answers. A separate
program, because the package warns when it is imported.

Use: beside_lm_eval.py HF_DIRECTORY FOLDER
"""

import json
import math
import os
import socket
import sys
import threading
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TQDM_DISABLE": "1"}

import lm_eval
import uvicorn
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from meshwright.serve.connections import configured
from meshwright.serve.examine import examinee_of
from meshwright.serve.http import Server, ServerLimits
from meshwright.serve.served import Capacity, serve_as
from meshwright.serve.trained import open_trained
from meshwright.spec.tasks import TaskSpec
from meshwright.tasks.ask import open_tasks
from meshwright.tasks.result import TaskResult

TASKS = {
    "choices": """\
output_type: multiple_choice
doc_to_text: "Question: {{question}}\\nAnswer:"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
num_fewshot: 2
fewshot_split: test
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "rolling": """\
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}} {{text}}"
metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}, {metric: bits_per_byte}]
""",
    "written": """\
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{text}}"
generation_kwargs: {until: ["\\n\\n", "three"], max_gen_toks: 12, do_sample: false}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
""",
}


def main(model: Path, folder: Path) -> None:
    """Measure both ways and compare."""
    rows = [
        {
            "question": f"def add_{number}(x): return",
            "choices": ["x + 1", f"x + {number}", "x", "add"],
            "answer": number % 4,
            # No repetition: HFLM merges windows with equal tokens, even if different positions in them are requested.
            "text": "x = " + "".join(f"add {number * step} to x, " for step in range(number * 3)),
        }
        for number in range(24)
    ]
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, body in TASKS.items():
        head = f"task: {name}\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {data}}}}}\ntest_split: test\n"
        (folder / f"{name}.yaml").write_text(head + body)
    specs = [TaskSpec(task=f"{name}.yaml") for name in TASKS]
    ours = open_tasks(specs, folder).ask(examinee_of(open_trained(model, device="cpu")))
    theirs = lm_eval.simple_evaluate(
        model=HFLM(pretrained=str(model), device="cpu", dtype="float32", batch_size=5),
        tasks=list(TASKS),
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
    )
    assert [result.name for result in ours] == list(TASKS)
    for result in ours:
        assert result.num_questions == len(rows)
        for name, metric in result.metrics.items():
            told = theirs["results"][result.name][f"{name},none"]
            assert math.isclose(metric.value, told, rel_tol=1e-5), (result.name, name, metric.value, told)
        samples = theirs["samples"][result.name]
        for record, sample in zip(result.records, samples, strict=True):
            if result.name == "written":
                assert record["answer"] == sample["filtered_resps"], (record, sample["filtered_resps"])
        print(result.line())
    beside_the_server(model, folder, ours)
    found = {result.name: result.metrics for result in ours}
    assert 0 < found["choices"]["acc"].value < 1
    assert len({str(record["answer"]) for record in ours[2].records}) > 3


def beside_the_server(model: Path, folder: Path, ours: list[TaskResult]) -> None:
    """The harness's `local-completions` queries our server (without the rolling task, whose windows it cuts
    differently)."""
    served = serve_as(open_trained(model, device="cpu"), "tiny", Capacity(max_batch=8))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = uvicorn.Server(configured(Server([served], ServerLimits()).app(), log_level="error"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}/v1/completions"
        asked = {"model": "tiny", "base_url": url, "tokenizer": str(model), "max_length": 256}
        theirs = lm_eval.simple_evaluate(
            model="local-completions",
            model_args=asked,
            batch_size=5,
            tasks=["choices", "written"],
            task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        )
        server.should_exit = True
        thread.join()
    for result in ours:
        if result.name not in theirs["results"]:
            continue
        for name, metric in result.metrics.items():
            told = theirs["results"][result.name][f"{name},none"]
            assert math.isclose(metric.value, told, rel_tol=1e-9), (result.name, name, metric.value, told)
        for record, sample in zip(result.records, theirs["samples"][result.name], strict=True):
            if result.name == "written":
                assert record["answer"] == sample["filtered_resps"], (record, sample["filtered_resps"])
    print("the server: equal", *theirs["results"])


main(Path(sys.argv[1]), Path(sys.argv[2]))
