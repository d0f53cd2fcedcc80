"""Text for training: data sets, a tokenised corpus on disk, loaders and tokenizers.

``loader_config`` picks the loader of a data set; ``register_datasets`` makes our data sets known to
torchtitan's own loaders. Importing this package changes nothing.
"""

from .corpus import Corpus, CorpusInfo, open_corpus, tokenizer_digest
from .datasets import (
    FINEWEB_EDU,
    LOCAL_FILES,
    PYTHON_STDLIB,
    RANDOM_TOKENS,
    DatasetKind,
    TextSource,
    dataset_kind,
    dataset_names,
    open_source,
    register_datasets,
)
from .loader import CorpusDataLoader, RandomTokenDataLoader, loader_config
from .streaming import StreamingDataLoader
from .tokenizer import CorpusTokenizer, VocabOnlyTokenizer

__all__ = [
    "FINEWEB_EDU",
    "LOCAL_FILES",
    "PYTHON_STDLIB",
    "RANDOM_TOKENS",
    "Corpus",
    "CorpusDataLoader",
    "CorpusInfo",
    "CorpusTokenizer",
    "DatasetKind",
    "RandomTokenDataLoader",
    "StreamingDataLoader",
    "TextSource",
    "VocabOnlyTokenizer",
    "dataset_kind",
    "dataset_names",
    "loader_config",
    "open_corpus",
    "open_source",
    "register_datasets",
    "tokenizer_digest",
]
