"""From the sources of a recipe to the batches of a rank, without torch."""

from meshwright.data.describe import describe_mixture, describe_sample
from meshwright.data.loader import Loader, Microbatch, evaluation_batches
from meshwright.data.mixture import Mixture, held_out_samples, training_samples
from meshwright.data.packing import NO_LABEL, BestFitSamples, ConcatenatedSamples, Sample, Samples
from meshwright.data.prepare import Corpus, Stream, find_tokenizer, prepare_corpus
from meshwright.data.tokenizer import TextTokenizer, load_tokenizer, train_tokenizer

__all__ = [
    "NO_LABEL",
    "BestFitSamples",
    "ConcatenatedSamples",
    "Corpus",
    "Loader",
    "Microbatch",
    "Mixture",
    "Sample",
    "Samples",
    "Stream",
    "TextTokenizer",
    "describe_mixture",
    "describe_sample",
    "evaluation_batches",
    "find_tokenizer",
    "held_out_samples",
    "load_tokenizer",
    "prepare_corpus",
    "train_tokenizer",
    "training_samples",
]
