"""Reads the settings of the transformer in a sentence-transformers folder: length and lower case.

Other settings that would change embeddings are refused.
"""

from fastsim.checks import check_choice
from fastsim.encoders.arguments import positive_or_none

# The names of the file, in the order in which sentence-transformers looks for them. We write the
# first.
LIMITS = [
    f"sentence_{kind}_config.json"
    for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
]
# Task -> (the output of the model that is used, its name for the next part).
_TASKS = {
    "feature-extraction": ("last_hidden_state", "token_embeddings"),
    "sequence-classification": ("logits", "scores"),
}
_READ = (
    *("max_seq_length", "do_lower_case", "transformer_task", "modality_config"),
    "module_output_name",
)
# Settings that change no embedding: locations of files, how weights are loaded (here as float32),
# how attention is computed, a layer that is not used.
_NEUTRAL = (
    *("backend", "cache_dir", "force_download", "local_files_only", "proxies", "revision"),
    *("subfolder", "token", "trust_remote_code", "use_auth_token"),
    *("add_pooling_layer", "attn_implementation", "device_map", "dtype", "low_cpu_mem_usage"),
    *("torch_dtype", "unpad_inputs", "use_cache", "use_fast", "use_safetensors"),
    *("clean_up_tokenization_spaces", "audio", "chat_template", "image", "video"),
)
# Keys whose value is {argument: value}, under the names of all versions.
_ARGUMENTS = (
    *("model_args", "tokenizer_args", "config_args", "model_kwargs", "processor_kwargs"),
    *("config_kwargs", "processing_kwargs"),
)


def transformer_settings(config, *, scores=False):
    """{max_length, lower_case} from the content of a `LIMITS` file.

    scores: whether a transformer that returns scores is allowed. TypeError, ValueError for values
    that do not fit or would change embeddings.
    """
    lower_case = config.get("do_lower_case")
    check_choice("do_lower_case", lower_case, (None, False, True))
    length = positive_or_none("max_seq_length", config.get("max_seq_length"))
    _check_output(config, tuple(_TASKS) if scores else ("feature-extraction",))
    for key, value in config.items():
        if key in _ARGUMENTS and isinstance(value, dict):
            for name, argument in value.items():
                _check_unused(f"{key}[{name!r}]", name, argument)
        elif key not in _READ:
            _check_unused(key, key, value)
    return {"max_length": length, "lower_case": bool(lower_case)}


def check_names(config):
    """ValueError if a part after the pooling reads or writes anything but embeddings."""
    for key in ("module_input_name", "module_output_name"):
        check_choice(key, config.get(key), (None, "sentence_embedding"))


def _check_output(config, tasks):
    task = config.get("transformer_task")
    check_choice("transformer_task", task, (None, *tasks))
    output, name = _TASKS[task or "feature-extraction"]
    check_choice("module_output_name", config.get("module_output_name"), (None, name))
    modalities = config.get("modality_config")
    text = {"method": "forward", "method_output_name": output}
    # With 'message' each text would be formatted by the tokenizer's chat template.
    if modalities is not None and (
        not isinstance(modalities, dict)
        or "message" in modalities
        or modalities.get("text") != text
    ):
        raise ValueError(
            f"modality_config: wanted no 'message', and {text} as 'text', got {modalities!r}"
        )


def _check_unused(where, name, value):
    empty = value is None or value in ({}, [], "")
    if name not in _NEUTRAL and not empty:
        raise ValueError(f"{where}: wanted none, since it may change embeddings, got {value!r}")
