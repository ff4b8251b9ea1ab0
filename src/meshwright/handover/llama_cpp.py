"""llama.cpp's results for a GGUF file, from a separate process: log-probabilities, tokens and the chat template.

llama.cpp comes with the package xllamacpp, whose wheels contain its server. Questions go to the server's HTTP interface
on the loopback address. Keys and values are cached in fp32, so differences come only from the weights' format.
"""

import json
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from meshwright.handover.asking import PATIENCE

PACKAGE = "xllamacpp"
COMMAND = (sys.executable, "-P", "-m", "meshwright.handover.llama_cpp")
"""The separate process, to be called by `ask`."""


def llama_cpp_installed() -> bool:
    """Whether llama.cpp is installed."""
    return find_spec(PACKAGE) is not None


def _serve(questions: dict[str, Any]) -> Any:
    xllamacpp: Any = import_module(PACKAGE)
    settings = xllamacpp.CommonParams()
    settings.model.path = questions["model"]
    settings.n_ctx, settings.n_parallel, settings.warmup = questions["context"], 1, False
    settings.use_jinja = True
    settings.cache_type_k = settings.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    settings.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    return xllamacpp.Server(settings)


def _answer(questions: dict[str, Any]) -> dict[str, Any]:
    server = _serve(questions)

    def post(path: str, **body: Any) -> dict[str, Any]:
        data = json.dumps(body).encode()
        request = urllib.request.Request(server.listening_address + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            return json.loads(answer.read())

    # The sampled token is forced: a token without text (an end, a part of a character) has no probabilities in the
    # answer. The probabilities are those of the model's logits, before the bias.
    shown = post("/tokenize", content="a", add_special=False)["tokens"][-1]

    def logprobs(prompt: Sequence[int]) -> list[float]:
        wanted = {"n_predict": 1, "n_probs": questions["vocab"], "temperature": -1, "logit_bias": [[shown, 1e4]]}
        reply = post("/completion", prompt=prompt, cache_prompt=False, post_sampling_probs=False, **wanted)
        row = [float("nan")] * questions["vocab"]
        for token in reply["completion_probabilities"][0]["top_logprobs"]:
            row[token["id"]] = token["logprob"]
        return row

    def tokens(text: str, *, special: bool) -> list[int]:
        return post("/tokenize", content=text, add_special=True, parse_special=special)["tokens"]

    def conversation(messages: Sequence[Any]) -> list[int] | None:
        try:
            text = post("/apply-template", messages=messages)["prompt"]
        except urllib.error.HTTPError:
            return None
        return tokens(text, special=True)

    return {
        "version": version(PACKAGE),
        "logprobs": [logprobs(prompt) for prompt in questions["prompts"]],
        "texts": [tokens(text, special=False) for text in questions["texts"]],
        "conversations": [conversation(messages) for messages in questions["conversations"]],
    }


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(_answer(json.loads(Path(sys.argv[1]).read_text()))))
