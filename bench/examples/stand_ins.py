"""What the scripts ask of the network, made here: models, data sets, files and two packages.

Models are BERT with random weights, of the width and layers that the scripts rely on, in the place
of every name; images are sentences. Evaluators answer nothing: they are no part of a loss.
"""

import functools
import gzip
import importlib
import importlib.util
import random
import sys
import tempfile
import types
import zlib
from collections import defaultdict
from pathlib import Path

import torch
import transformers

from bench.examples import rows

WIDTH, HEADS, LENGTH = 768, 12, 512
FREQUENCIES = 25_000  # words that a script counts
MODERN = "ModernBERT"  # whose layers a script names


def folder(layers, *, modern):
    """A plain transformers folder of random weights."""
    return _folder(layers, WIDTH, HEADS, modern)


@functools.cache
def _folder(layers, width, heads, modern):
    path = Path(tempfile.mkdtemp(prefix="fastsim-examples-"))
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    pieces = [*special, *rows.WORDS, *".,;:!?()'\"-"]
    (path / "vocab.txt").write_text("\n".join(pieces))
    tokenizer = transformers.BertTokenizer(str(path / "vocab.txt"), model_max_length=LENGTH)
    sizes = {
        "vocab_size": len(pieces),
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": 128,
        "max_position_embeddings": LENGTH,
    }
    torch.manual_seed(0)
    if modern:
        ids = {f"{name}_token_id": 0 for name in ("pad", "bos", "eos", "cls", "sep")}
        model = transformers.ModernBertModel(transformers.ModernBertConfig(**sizes, **ids))
    else:
        model = transformers.BertModel(transformers.BertConfig(**sizes))
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


def local(name, layers):
    """The folder that stands in for a model's name; a folder that is there stands for itself."""
    return str(name) if Path(name).exists() else folder(layers, modern=MODERN in str(name))


def own_words(model, name):
    """Other words for another name: a teacher is not its student."""
    draw = torch.Generator().manual_seed(zlib.crc32(str(name).encode()))
    words = model.transformers_model.get_input_embeddings().weight
    with torch.no_grad():
        words.normal_(0, 0.02, generator=draw)


def named(kind, layers):
    """Let a model class of sentence-transformers take any name."""
    original = kind.__init__

    @functools.wraps(original)
    def init(self, name=None, *given, **options):
        if name is None or Path(name).exists():
            return original(self, name, *given, **options)
        for option in ("model_kwargs", "processor_kwargs", "config_kwargs", "revision"):
            options.pop(option, None)
        original(self, local(name, layers), *given, **options)
        own_words(self, name)
        return None

    kind.__init__ = init


def named_parts(layers):
    """The same of their module Transformer and of transformers' Auto classes."""
    from sentence_transformers.base.modules import Transformer

    original = Transformer.__init__

    @functools.wraps(original)
    def init(self, model_name_or_path, *given, **options):
        original(self, local(model_name_or_path, layers), *given, **options)

    Transformer.__init__ = init
    for kind in (
        transformers.AutoConfig,
        transformers.AutoTokenizer,
        transformers.models.auto.auto_factory._BaseAutoModelClass,
    ):
        found = kind.__dict__["from_pretrained"].__func__

        def from_pretrained(cls, name, *given, found=found, **options):
            return found(cls, local(name, layers), *given, **options)

        kind.from_pretrained = classmethod(from_pretrained)


def small_data():
    """`load_dataset`, and parts of data sets that are as large as there are rows.

    Text that a script takes through pandas stays what it is in a data set; pandas 3 gives it a
    type of its own, beside which data sets do not put the other.
    """
    import datasets
    import pandas

    pandas.set_option("future.infer_string", False)

    datasets.load_dataset = rows.load_dataset
    select, split = datasets.Dataset.select, datasets.Dataset.train_test_split

    def selected(self, indices, *given, **options):
        inside = [index for index in indices if 0 <= index < len(self)]
        return select(self, inside or range(len(self)), *given, **options)

    def parted(self, test_size=None, *given, **options):
        if isinstance(test_size, int):
            test_size = min(test_size, len(self) // 4)
        return split(self, test_size, *given, **options)

    datasets.Dataset.select, datasets.Dataset.train_test_split = selected, parted
    sample = random.sample
    random.sample = lambda given, k: sample(given, min(k, len(given)))


def no_evaluation():
    """Every evaluator takes anything and answers nothing."""
    from sentence_transformers.base.evaluation import BaseEvaluator

    class Silent(BaseEvaluator):
        primary_metric, greater_is_better, evaluators = "none", True, ()

        def __init__(self, *given, **options):
            pass

        def __call__(self, *given, **options):
            return defaultdict(float)

    for kind in ("sentence_transformer", "multi_vector_encoder", "cross_encoder"):
        importlib.import_module(f"sentence_transformers.{kind}.evaluation")
    for name, module in list(sys.modules.items()):
        if name.startswith("sentence_transformers") and "evaluation" in name:
            for attribute in vars(module):
                if attribute.endswith("Evaluator"):
                    setattr(module, attribute, Silent)


def absent():
    """What scripts ask for that is not there.

    Two import a name from a module of the package that has not got it, nor had it in version 6.0;
    one asks for the properties of the GPU, to print them.
    """
    from sentence_transformers import SentenceTransformerTrainingArguments
    from sentence_transformers.base import training_args

    training_args.SentenceTransformerTrainingArguments = SentenceTransformerTrainingArguments
    gpu = types.SimpleNamespace(name="none", total_memory=1 << 30)
    torch.cuda.get_device_properties = lambda device: gpu


def files():
    """What scripts read from their folder or are given by name."""
    chance = random.Random(0)
    with gzip.open("glove.6B.300d.txt.gz", "wt") as handle:
        for word in rows.WORDS:
            numbers = " ".join(f"{chance.gauss(0, 1):.4f}" for _ in range(300))
            handle.write(f"{word} {numbers}\n")
    words = [*rows.WORDS, *(f"word{number}" for number in range(FREQUENCIES))]
    frequencies = [f"{word}\t{chance.randint(1, 900)}" for word in words]
    texts = [rows.sentence(chance) for _ in range(rows.ROWS)]
    pairs = [f"{text}\t{rows.sentence(chance)}" for text in texts]
    for name, lines in {
        "wikipedia_doc_frequencies.txt": ["1000", *frequencies],
        "generated_queries.tsv": pairs,
        "sentences.txt": texts,
    }.items():
        Path(name).write_text("\n".join(lines) + "\n")


def packages():
    """Packages of the scripts that are not installed: as much of each as they call."""
    from sentence_transformers import SentenceTransformer

    class Detokenizer:
        def detokenize(self, words):
            return " ".join(words)

    class Augmented:
        def __init__(self, **options):
            pass

        def augment(self, texts):
            return [f"{rows.WORDS[len(text) % len(rows.WORDS)]} {text}" for text in texts]

    class Fast:
        @staticmethod
        def from_pretrained(model_name, **options):
            return SentenceTransformer(model_name)

        @staticmethod
        def get_peft_model(model, **options):
            return model

    class Index:
        """A search engine that finds what was written last."""

        def __init__(self):
            self.indices, self.held = types.SimpleNamespace(create=lambda **options: None), []

        def index(self, index, id, body):
            self.held.append({"_id": id, "_source": body})

        def search(self, index, body, size):
            return {"hits": {"hits": self.held[-size:]}}

    for name, held in {
        "nltk": {"word_tokenize": str.split},
        "nltk.tokenize": {},
        "nltk.tokenize.treebank": {"TreebankWordDetokenizer": Detokenizer},
        "nlpaug": {},
        "nlpaug.augmenter": {},
        "nlpaug.augmenter.word": {"ContextualWordEmbsAug": Augmented},
        "unsloth": {"FastSentenceTransformer": Fast, "is_bf16_supported": lambda: False},
        "elasticsearch": {"Elasticsearch": Index},
    }.items():
        module(name, held)


def module(name, held):
    """A module `name` that has `held`, where no such package is installed."""
    root, _, last = name.rpartition(".")
    known = sys.modules.get(name.partition(".")[0])
    if known is None and importlib.util.find_spec(name.partition(".")[0]) is not None:
        return
    found = types.ModuleType(name)
    found.__path__ = []
    vars(found).update(held)
    sys.modules[name] = found
    if root:
        setattr(sys.modules[root], last, found)


def pictures():
    """Models of pictures, to which sentences are given here."""
    from sentence_transformers import MultiVectorEncoder, SentenceTransformer
    from sentence_transformers.sentence_transformer import modules

    modules.CLIPModel = SentenceTransformer
    original = SentenceTransformer.__init__

    @functools.wraps(original)
    def init(self, *given, **options):
        whole = options.get("modules") or ()
        if any(isinstance(each, SentenceTransformer) for each in whole):
            options["modules"] = [part for each in whole for part in each]
        original(self, *given, **options)

    SentenceTransformer.__init__ = init
    found = MultiVectorEncoder.transformers_model.fget

    def transformers_model(self):
        """With the names by which a script freezes layers of a ColQwen2."""
        model = found(self)
        if isinstance(model, transformers.BertModel):
            language = types.SimpleNamespace(layers=model.encoder.layer)
            model.__dict__["vlm"] = types.SimpleNamespace(language_model=language)
            model.__dict__["embedding_proj_layer"] = self[1]
        return model

    MultiVectorEncoder.transformers_model = property(transformers_model)
