"""Defaults that follow the data: a packing that keeps records whole, a chat template that the tokenizer can write."""

import json
from collections.abc import Sequence

from meshwright.data.chat import tokens_lacking
from meshwright.data.readers import read_documents
from meshwright.data.sources import SourceFile
from meshwright.data.tokenizer import TextTokenizer
from meshwright.spec.data import DataSpec

PREFERRED = ("chatml", "llama3", "mistral", "plain")
"""The named templates that suit any conversation, in the order in which they are tried; the last needs no tokens."""


def with_packing(data: DataSpec, files: Sequence[SourceFile], *, separates: bool) -> tuple[DataSpec, str]:
    """The data section with a packing for the records among the files, where it names none, and the reason.

    `separates`: whether the model can isolate the documents of a sample.
    """
    formats, given = {file.format for file in files if file.is_records}, data.model_fields_set
    update = {}
    if formats and "packing" not in given:
        update["packing"] = "best_fit" if separates else "padded"
    whole = update.get("packing", data.packing) == "best_fit"
    if "separate_documents" not in given and ("preference" in formats or (formats and whole)):
        update["separate_documents"] = True
    if not update:
        return data, ""
    words = {"best_fit": "best_fit", "padded": "padded, because this model cannot isolate documents of a sample"}
    chosen = words[update["packing"]] if "packing" in update else data.packing
    apart = ", documents separate" if "separate_documents" in update else ""
    return data.model_copy(update=update), f"{chosen}{apart}: records stay whole"


def with_template(data: DataSpec, files: Sequence[SourceFile], tokenizer: TextTokenizer | None) -> tuple[DataSpec, str]:
    """The data section with a named template for its conversations, if it names none and the tokenizer has none, and
    the reason."""
    given = "template" in data.chat.model_fields_set
    if given or tokenizer is None or tokenizer.chat_template is not None or not _converse(files):
        return data, ""
    name = next(name for name in PREFERRED if not tokens_lacking(name, tokenizer))
    has = "and the tokens of no other template" if name == "plain" else "but the tokens of this one"
    chat = data.chat.model_copy(update={"template": name})
    return data.model_copy(update={"chat": chat}), f"{name}: the tokenizer has no chat template, {has}"


def _converse(files: Sequence[SourceFile]) -> bool:
    """Whether the first record of a file is a conversation, which a template renders."""
    for file in files:
        if file.is_records and (first := next(read_documents([file]), None)):
            record = json.loads(first.text)
            if "messages" in record.get("chosen", record):
                return True
    return False
