"""From the sources of a recipe to the batches of a rank, without torch."""

from meshwright.data.describe import describe_sample
from meshwright.data.loader import Loader, Microbatch, evaluation_batches
from meshwright.data.packing import NO_LABEL, ConcatenatedSamples, Sample, Samples
from meshwright.data.prepare import Corpus, find_tokenizer, prepare_corpus
from meshwright.data.tokenizer import TextTokenizer, load_tokenizer, train_tokenizer

__all__ = [
    "NO_LABEL",
    "ConcatenatedSamples",
    "Corpus",
    "Loader",
    "Microbatch",
    "Sample",
    "Samples",
    "TextTokenizer",
    "describe_sample",
    "evaluation_batches",
    "find_tokenizer",
    "load_tokenizer",
    "prepare_corpus",
    "train_tokenizer",
]
