"""Converts a Llama model from GGUF to a Hugging Face checkpoint, which vLLM loads.

A script for the engine's environment: `checkpoint.py DIRECTORY_WITH_GGUF TARGET`. It renames tensors, dequantises weights to
bfloat16, and reorders the rows of query and key projections (GGUF interleaves the halves of the rotary embedding).
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer, LlamaConfig

OUTSIDE_LAYERS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
INSIDE_LAYERS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class NotThisModelError(Exception):
    """The file has another model."""


def convert(source: Path, target: Path) -> None:
    """Write configuration, tokenizer and weights of the one GGUF file in `source` to `target`. Raises NotThisModelError."""
    files = sorted(source.glob("*.gguf"))
    if len(files) != 1:
        raise NotThisModelError(f"{source} holds {len(files)} GGUF files instead of one")
    reader = gguf.GGUFReader(files[0])
    config = configuration(reader)
    weights = dict(checkpoint_tensors(reader, config))
    target.mkdir(parents=True)
    AutoTokenizer.from_pretrained(source, gguf_file=files[0].name).save_pretrained(target)
    config.save_pretrained(target)
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})


def configuration(reader: Any) -> Any:
    """The model's configuration from the file's key-value part. Raises NotThisModelError."""

    def said(key: str) -> Any:
        return reader.fields[key].contents()

    if said("general.architecture") != "llama":
        raise NotThisModelError(f"the model is a {said('general.architecture')}, not a llama")
    (embeddings,) = (tensor for tensor in reader.tensors if tensor.name == "token_embd.weight")
    config = LlamaConfig(
        vocab_size=int(embeddings.shape[1]),
        hidden_size=said("llama.embedding_length"),
        intermediate_size=said("llama.feed_forward_length"),
        num_hidden_layers=said("llama.block_count"),
        num_attention_heads=said("llama.attention.head_count"),
        num_key_value_heads=said("llama.attention.head_count_kv"),
        max_position_embeddings=said("llama.context_length"),
        rms_norm_eps=said("llama.attention.layer_norm_rms_epsilon"),
        rope_theta=said("llama.rope.freq_base"),
        bos_token_id=said("tokenizer.ggml.bos_token_id"),
        eos_token_id=said("tokenizer.ggml.eos_token_id"),
        tie_word_embeddings=not any(tensor.name == "output.weight" for tensor in reader.tensors),
    )
    config.architectures = ["LlamaForCausalLM"]
    config.dtype = "bfloat16"
    return config


def checkpoint_tensors(reader: Any, config: Any) -> Iterator[tuple[str, Any]]:
    """The weights by the names of the checkpoint. Raises NotThisModelError for a tensor that has none."""
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        part = tensor.name.removesuffix(".weight").split(".")
        if part[-1] in heads:
            values = halves_in_sequence(values, heads[part[-1]])
        name = _checkpoint_name(part)
        if name is None:
            raise NotThisModelError(f"the tensor {tensor.name} has no place in the checkpoint")
        yield name, torch.from_numpy(np.ascontiguousarray(values)).to(torch.bfloat16)


def halves_in_sequence(rows: Any, heads: int) -> Any:
    """Rows of a projection, a head's interleaved halves one after the other."""
    pairs = rows.reshape(heads, -1, 2, rows.shape[1])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _checkpoint_name(part: list[str]) -> str | None:
    match part:
        case ["blk", layer, inside] if inside in INSIDE_LAYERS:
            return f"model.layers.{layer}.{INSIDE_LAYERS[inside]}.weight"
        case [outside] if outside in OUTSIDE_LAYERS:
            return f"{OUTSIDE_LAYERS[outside]}.weight"
        case ["output"]:
            return "lm_head.weight"
        case _:
            return None


if __name__ == "__main__":
    try:
        convert(Path(sys.argv[1]), Path(sys.argv[2]))
    except NotThisModelError as error:
        sys.exit(str(error))
