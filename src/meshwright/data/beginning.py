"""The beginning of a corpus, encoded as for training, so that a recipe is checked in seconds."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice

import numpy as np

from meshwright.data.examples import EncodedText, RecordEncoder
from meshwright.data.readers import Document, read_all
from meshwright.data.sources import SourceFile
from meshwright.data.token_file import TokenFile, file_in_memory, open_token_file, scan_tokens
from meshwright.data.tokenizer import TextTokenizer
from meshwright.spec.errors import UserError
from meshwright.spec.problems import RecipeError
from meshwright.spec.text import counted

MOST_ERRORS = 5
"""Most errors of records that are listed."""


def first_records(files: Sequence[SourceFile], encoder: RecordEncoder, num: int) -> TokenFile:
    """The first records of some files, encoded as for training, without the records that training drops. Raises
    RecipeError with the different errors among them."""
    read = list(islice(read_all(files), num))
    encoded = encoder.encode([document.text for document in read])
    if any(record.error for record in encoded):
        raise RecipeError(_each_kind(read, encoded))
    documents = [ids for record in encoded for ids in record.documents]
    if not documents:
        raise UserError(f"{files[0].name}: all checked records are left out: too long, or without an answer")
    notes = [note for document, record in zip(read, encoded, strict=True) for note in (document.note, record.note)]
    counts = Counter(filter(None, notes))
    return replace(file_in_memory(documents, masked=True), is_pairs=files[0].format == "preference", counts=counts)


def _each_kind(read: Sequence[Document], encoded: Sequence[EncodedText]) -> list[str]:
    """The first MOST_ERRORS different errors of records, each with its first record."""
    kinds: dict[str, list[str]] = {}
    for document, record in zip(read, encoded, strict=True):
        if record.error:
            kinds.setdefault(record.error, []).append(document.id)
    problems = [
        f"{ids[0]}: {error}" + (f" (also {counted(len(ids) - 1, 'other record')})" if len(ids) > 1 else "")
        for error, ids in kinds.items()
    ]
    more = problems[MOST_ERRORS:]
    left = [f"{read[0].id.rpartition(':')[0]}: {counted(len(more), 'more record')} with an error"] if more else []
    return problems[:MOST_ERRORS] + left


def first_tokens(file: SourceFile, tokenizer: TextTokenizer, num_tokens: int) -> TokenFile:
    """The first tokens of a token file, about `num_tokens`, in whole documents if it has several."""
    if file.tokens is None:
        whole = open_token_file(file.path, tokenizer)
        return whole.part(0, min(whole.num_documents, whole.document_at(num_tokens) + 1))
    dtype = np.dtype(file.tokens).newbyteorder("<")
    tokens = np.fromfile(file.path, dtype, num_tokens).astype(np.int64)
    _, lengths = scan_tokens(tokens, eos_id=tokenizer.eos_id)
    return file_in_memory(np.split(tokens, np.cumsum(lengths)[:-1]), file.path)
