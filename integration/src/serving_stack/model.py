# SPDX-License-Identifier: Apache-2.0
"""`serving-stack model DIR`: write the tiny GLM-architecture model that the stack serves on a CPU.

The model goes through the same code as a large one (MLA with a latent of 512 + 64 values, a dense and several
mixture-of-experts layers, GLM's tokens and chat template) but knows nothing: it strings together words of a small
text that ships with this package. Three properties make it useful in tests:

* **The same bytes every time.** No weight comes out of a floating-point library. Every number is drawn from
  SHAKE-256 with integer arithmetic, multiplied by a power of two and rounded to bfloat16; the tokenizer is trained on
  the shipped text. Two runs on two machines write the same files.
* **A clear winner at every step.** The embedding of a token holds the sum of the codes of `SUCCESSORS` tokens that
  may follow it, and the row of a token in the output matrix is its code. What may come next is therefore decided far
  above the noise of bfloat16; which of the few comes next is decided by everything in the context, through all
  attention and expert layers. Experts are chosen by dimensions of the residual stream that no layer writes to (the
  expert ranking of a token is part of its embedding), so that rounding cannot send a token to another expert. The
  prompts of :func:`prompt_tokens` were searched for answers without a close call.
* **An answer that depends on the cache.** Attention heads are moderately peaked and their output is as large as the
  embedding: one exchanged block of keys and values changes the answer, unless the prompt is thousands of tokens long.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import math
import os
import shutil
import tempfile
from collections import Counter
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from .errors import StackError

__all__ = ["ADDED_TOKENS", "CHAT_TEMPLATE", "FORMAT", "SEED", "prompt_tokens", "text_tokenizer", "write_model"]

#: Version of what `write_model` writes; part of the marker file, raised with every change of the bytes.
FORMAT = 1
#: Names the weights among all that could be drawn.
SEED = 0
#: Tokens that may follow a token.
SUCCESSORS = 6
#: A token follows so many others at most, so that answers do not meet in a few frequent words.
_POPULAR = 8

VOCABULARY = 2048
CONTEXT = 16384
HIDDEN = 512
#: Dimensions of the residual stream that hold codes and that layers write to; the others hold the token's identity.
CODE = 384
LAYERS = 4
HEADS = 8
Q_RANK = 128
LATENT = 512
ROPE = 64
NOPE = 64
VALUE = 64
DENSE_WIDTH = 512
EXPERTS = 8
EXPERTS_PER_TOKEN = 2
EXPERT_WIDTH = 128

#: Standard deviation of the attention scores, per head, in 64ths: some heads look at many tokens, some at few.
_SHARPNESS = (80, 96, 112, 128, 144, 160, 176, 208)
#: The positional part weighs more than the other by this factor, in 64ths: the same word means something else a few
#: tokens later, which keeps answers from going in circles.
_POSITION = 96
#: What the parts of a layer add to the residual stream, in 64ths of a unit input.
_ATTENTION_GAIN = 192
_DENSE_GAIN = 96
_EXPERT_GAIN = 64
#: Output logits are multiplied by two to this power.
_LOGIT_SHIFT = -3
#: Every embedding ends with this number. The output matrix uses it to subtract the part of a logit that all successors
#: share, so that the logits that compete are small and bfloat16 keeps their differences.
_CONSTANT = 8

_MARKER = ".serving-stack-model"
_END = "<|endoftext|>"

#: GLM's added tokens in GLM's order, with True for those that decoding drops (`skip_special_tokens`).
ADDED_TOKENS: tuple[tuple[str, bool], ...] = (
    *(
        (text, True)
        for text in (
            "<|endoftext|>",
            "[MASK]",
            "[gMASK]",
            "[sMASK]",
            "<sop>",
            "<eop>",
            "<|system|>",
            "<|user|>",
            "<|assistant|>",
            "<|observation|>",
            "<|begin_of_image|>",
            "<|end_of_image|>",
            "<|begin_of_video|>",
            "<|end_of_video|>",
            "<|begin_of_audio|>",
            "<|end_of_audio|>",
            "<|begin_of_transcription|>",
            "<|end_of_transcription|>",
            "<|code_prefix|>",
            "<|code_middle|>",
            "<|code_suffix|>",
        )
    ),
    *(
        (text, False)
        for text in (
            "<think>",
            "</think>",
            "<tool_call>",
            "</tool_call>",
            "<tool_response>",
            "</tool_response>",
            "<arg_key>",
            "</arg_key>",
            "<arg_value>",
            "</arg_value>",
            "/nothink",
            "<|begin_of_box|>",
            "<|end_of_box|>",
            "<|image|>",
            "<|video|>",
        )
    ),
)

#: Cuts text into words, numbers of up to three digits, punctuation and white space, as GLM's tokenizer does.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

#: The conversation as GLM-4.7 reads it. History is rendered as it was generated, so that a prompt is a prefix of the
#: next turn's prompt. Only constructs that both Jinja and minijinja know. Two habits of Dynamo 1.6 are met halfway:
#: it joins the parts of a content with a line break before it renders, and it hands over arguments as an object unless
#: the template asks whether they are a string.
CHAT_TEMPLATE = """\
{%- macro text(content) -%}
{%- if content is string -%}
{{- content -}}
{%- elif content is iterable and content is not mapping -%}
{%- for part in content -%}
{%- if not loop.first -%}
{{- '\\n' -}}
{%- endif -%}
{%- if part is string -%}
{{- part -}}
{%- elif part.type == 'text' -%}
{{- part.text -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{{- '[gMASK]<sop>' -}}
{%- if tools -%}
{{- '<|system|>\\n# Tools\\n\\nYou may call one or more of the functions below. Their signatures stand between ' -}}
{{- '<tools> and </tools>, one JSON object per line:\\n<tools>\\n' -}}
{%- for tool in tools -%}
{{- tool | tojson -}}
{{- '\\n' -}}
{%- endfor -%}
{{- '</tools>\\n\\nWrite each call like this:\\n<tool_call>function-name\\n' -}}
{{- '<arg_key>argument-name</arg_key>\\n<arg_value>argument-value</arg_value>\\n</tool_call>' -}}
{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'system' or message.role == 'developer' -%}
{{- '<|system|>' -}}
{{- text(message.content) -}}
{%- elif message.role == 'user' -%}
{{- '<|user|>' -}}
{{- text(message.content) -}}
{%- elif message.role == 'assistant' -%}
{{- '<|assistant|><think>' -}}
{%- if message.reasoning is string -%}
{{- message.reasoning -}}
{%- elif message.reasoning_content is string -%}
{{- message.reasoning_content -}}
{%- endif -%}
{{- '</think>' -}}
{{- text(message.content) -}}
{%- if message.tool_calls -%}
{%- for call in message.tool_calls -%}
{%- if call.function -%}
{%- set function = call.function -%}
{%- else -%}
{%- set function = call -%}
{%- endif -%}
{{- '<tool_call>' -}}
{{- function.name -}}
{{- '\\n' -}}
{%- if function.arguments is mapping -%}
{%- for key, value in function.arguments.items() -%}
{{- '<arg_key>' -}}
{{- key -}}
{{- '</arg_key>\\n<arg_value>' -}}
{%- if value is string -%}
{{- value -}}
{%- else -%}
{{- value | tojson -}}
{%- endif -%}
{{- '</arg_value>\\n' -}}
{%- endfor -%}
{%- elif function.arguments -%}
{{- function.arguments -}}
{{- '\\n' -}}
{%- endif -%}
{{- '</tool_call>' -}}
{%- endfor -%}
{%- endif -%}
{%- elif message.role == 'tool' -%}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}
{{- '<|observation|>' -}}
{%- endif -%}
{{- '<tool_response>' -}}
{{- text(message.content) -}}
{{- '</tool_response>' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|assistant|><think>' -}}
{%- if enable_thinking is defined and not enable_thinking -%}
{{- '</think>' -}}
{%- endif -%}
{%- endif -%}
"""

_Ints = npt.NDArray[np.int64]
_Bits = npt.NDArray[np.uint16]


def _corpus() -> str:
    data = (resources.files(__package__) / "_data" / "corpus.txt").read_bytes()
    return data.decode("utf-8").replace("\r\n", "\n")


@lru_cache(maxsize=1)
def text_tokenizer() -> Tokenizer:
    """Train the byte-level BPE tokenizer on the shipped text and return it (the same object at every call).

    Every byte is in the alphabet, so any text survives encoding and decoding. The last tokens of the vocabulary are
    GLM's added ones.

    Raises:
        StackError: when the shipped text does not carry a vocabulary of the full size.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(ADDED_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[],
        show_progress=False,
    )
    tokenizer.train_from_iterator([_corpus()], trainer)
    for text, special in ADDED_TOKENS:
        token = AddedToken(text, normalized=False, special=special)
        if special:
            tokenizer.add_special_tokens([token])
        else:
            tokenizer.add_tokens([token])
    if tokenizer.get_vocab_size() != VOCABULARY:
        raise StackError(f"the shipped text gave {tokenizer.get_vocab_size()} tokens instead of {VOCABULARY}")
    return tokenizer


def _token(text: str) -> int:
    """Return the token of a text that is one."""
    token = text_tokenizer().token_to_id(text)
    if token is None:
        raise KeyError(text)
    return token


@lru_cache(maxsize=1)
def _corpus_tokens() -> tuple[int, ...]:
    return tuple(text_tokenizer().encode(_corpus(), add_special_tokens=False).ids)


#: Prompt length -> where it starts in the shipped text. Found by search, with vLLM 0.31 on AMX and with transformers
#: 5.17: in the 24 tokens that answer these prompts the best logit leads by 0.16 or more (the short ones: 0.39), where
#: margins move by 0.08 at most when a prompt is read in other pieces. Of the prompt of 1,000 tokens every block of 32,
#: of that of 6,000 tokens a sample of blocks of 128 changes the answer when exchanged for another prompt's.
_STARTS = {
    1: 10903,
    31: 3538,
    32: 11597,
    33: 10916,
    127: 6628,
    128: 11519,
    129: 622,
    1000: 8142,
    6000: 2041,
}


def prompt_tokens(length: int) -> list[int]:
    """Return a prompt of `length` tokens cut from the shipped text, the same at every call.

    Prompts of different lengths start at different places of the text, so that none is a prefix of another and a
    prefix cache that holds one does not shorten another. With the lengths 1, 31 to 33, 127 to 129, 1000 and 6000 the
    24 tokens of the greedy answer were chosen to be beyond the reach of rounding errors; with other lengths one step
    in twelve is a closer call.

    Raises:
        ValueError: when `length` is not positive.
    """
    if length < 1:
        raise ValueError(f"a prompt has at least one token, not {length}")
    tokens = _corpus_tokens()
    start = _STARTS.get(length, length * 4099 % len(tokens))
    repeats = (start + length) // len(tokens) + 1
    return list((tokens * repeats)[start : start + length])


def _bytes(name: str, seed: int, count: int) -> npt.NDArray[np.uint8]:
    return np.frombuffer(hashlib.shake_256(f"serving-stack {seed} {name}".encode()).digest(count), dtype=np.uint8)


def _draw(name: str, seed: int, rows: int, columns: int) -> _Ints:
    """Sums of four bytes minus their mean: integers from -510 to 510 with a variance of exactly 21845."""
    summed: _Ints = _bytes(name, seed, rows * columns * 4).reshape(rows, columns, 4).sum(axis=2, dtype=np.int64)
    return summed - 510


#: Weights are integers times two to the power of minus this.
_FRACTION_BITS = 20


def _scale(gain: int, inputs: int) -> int:
    """Integer factor that gives a sum over `inputs` unit inputs a standard deviation of `gain` / 64."""
    return math.isqrt((gain * gain << (2 * _FRACTION_BITS - 12)) // (inputs * 21845))


def _bfloat16(integers: _Ints, fraction_bits: int = _FRACTION_BITS) -> _Bits:
    """Round `integers` / 2**`fraction_bits` to bfloat16 (ties to even); the division and the input are exact."""
    if integers.size and int(np.abs(integers).max()) >= 1 << 24:
        raise ValueError("an integer of more than 24 bits is not exact in float32")
    bits = (integers.astype(np.float32) * np.float32(2.0**-fraction_bits)).view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    rounded: _Bits = ((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)).astype(np.uint16)
    return rounded


def _successors(seed: int) -> tuple[list[list[int]], list[int]]:
    """Return the tokens that may follow each token, and the tokens that may be generated at all."""
    tokenizer, corpus = text_tokenizer(), _corpus_tokens()
    first_added = VOCABULARY - len(ADDED_TOKENS)
    texts = [tokenizer.decode([token], skip_special_tokens=False) for token in range(first_added)]
    printable = [token for token, text in enumerate(texts) if text.isascii() and text.replace("\n", " ").isprintable()]
    allowed = set(printable)
    end = _token(_END)
    order = _bytes("fill", seed, VOCABULARY * SUCCESSORS * 4).view("<u4").astype(np.int64).tolist()
    pairs: list[Counter[int]] = [Counter() for _ in range(VOCABULARY)]
    starts: Counter[int] = Counter()
    for left, right in itertools.pairwise(corpus):
        if right in allowed and left != right:
            pairs[left][right] += 1
            if texts[left].endswith("\n"):
                starts[right] += 1
    beginnings = sorted(token for token in starts if texts[token].isalpha() and texts[token][0].isupper())
    used: Counter[int] = Counter()
    chosen: list[list[int]] = []
    for token in range(VOCABULARY):
        mine: list[int] = []
        if token < first_added and (texts[token].rstrip("\n").endswith((".", "?", "!")) or order[token] % 16 == 0):
            mine.append(end)
        for candidate, _ in sorted(pairs[token].items(), key=lambda item: (-item[1], item[0])):
            if len(mine) < SUCCESSORS and used[candidate] < _POPULAR:
                mine.append(candidate)
        source = printable if token < first_added else beginnings
        draws = iter(order[token * SUCCESSORS : (token + 1) * SUCCESSORS])
        while len(mine) < SUCCESSORS:
            position = next(draws)
            while source[position % len(source)] in mine:
                position += 1
            mine.append(source[position % len(source)])
        used.update(mine)
        chosen.append(mine)
    return chosen, [*printable, end]


_Tensors = dict[str, tuple[str, tuple[int, ...], bytes]]


def _safetensors(tensors: _Tensors) -> bytes:
    """Lay tensors out in the safetensors format: length of the header, JSON header, data.

    Written here and not by the library, whose interface and order of tensors differ between versions.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, (kind, shape, data) in tensors.items():
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [position, position + len(data)]}
        position += len(data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return b"".join([len(text).to_bytes(8, "little"), text, *(data for _, _, data in tensors.values())])


_WEIGHT_BITS = 12


def _equal_weights(codes: _Ints) -> _Ints:
    """Weights, in 1/2**`_WEIGHT_BITS`, with which a sum of codes has the same product with each of them.

    Codes are not quite orthogonal; without the correction some successors would have a head start. Solved with a few
    rounds of integer relaxation, so that the result is the same on every machine.

    Args:
        codes: [tokens, successors, `CODE`] of +1 and -1.
    """
    products = codes @ codes.transpose(0, 2, 1)
    weights = np.full(codes.shape[:2], 1 << _WEIGHT_BITS, dtype=np.int64)
    for _ in range(24):
        weights += ((CODE << _WEIGHT_BITS) - (products @ weights[:, :, None])[:, :, 0]) // CODE
    return weights


def _weights(seed: int) -> _Tensors:
    """Draw all weights; return name -> (type, shape, little-endian bytes)."""
    tensors: _Tensors = {}

    def put(name: str, bits: _Bits) -> None:
        tensors[name] = ("BF16", bits.shape, bits.astype("<u2").tobytes())

    def ones(name: str, size: int) -> None:
        put(name, _bfloat16(np.ones(size, dtype=np.int64), 0))

    def reads(name: str, rows: int, columns: int, gain: int = 64) -> None:
        put(name, _bfloat16(_draw(name, seed, rows, columns) * _scale(gain, columns)))

    def writes(name: str, columns: int, gain: int) -> None:
        drawn = _draw(name, seed, HIDDEN, columns) * _scale(gain, columns)
        drawn[CODE:] = 0
        put(name, _bfloat16(drawn))

    def mlp(prefix: str, width: int, gain: int) -> None:
        reads(f"{prefix}.gate_proj.weight", width, HIDDEN)
        reads(f"{prefix}.up_proj.weight", width, HIDDEN)
        writes(f"{prefix}.down_proj.weight", width, gain)

    successors, speakable = _successors(seed)
    codes = (
        2 * np.unpackbits(_bytes("codes", seed, VOCABULARY * CODE // 8)).reshape(VOCABULARY, CODE).astype(np.int64) - 1
    )
    embedding = np.zeros((VOCABULARY, HIDDEN), dtype=np.int64)
    following = codes[np.asarray(successors)]
    weights = _equal_weights(following)
    embedding[:, :CODE] = (following * weights[:, :, None]).sum(axis=1)
    identity = HIDDEN - CODE
    embedding[:, CODE:] = (
        4
        * np.unpackbits(_bytes("identity", seed, VOCABULARY * identity // 8))
        .reshape(VOCABULARY, identity)
        .astype(np.int64)
        - 2
    )
    ranks = _bytes("experts", seed, VOCABULARY * (LAYERS - 1) * EXPERTS * 4).view("<u4")
    ranking = ranks.reshape(VOCABULARY, LAYERS - 1, EXPERTS).argsort(axis=2, kind="stable")
    embedding[:, CODE : CODE + (LAYERS - 1) * EXPERTS] = (2 * ranking.astype(np.int64) - (EXPERTS - 1)).reshape(
        VOCABULARY, -1
    ) << _WEIGHT_BITS
    embedding[:, -1] = _CONSTANT << _WEIGHT_BITS
    put("model.embed_tokens.weight", _bfloat16(embedding, _WEIGHT_BITS))

    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        attention = f"{prefix}.self_attn"
        ones(f"{prefix}.input_layernorm.weight", HIDDEN)
        ones(f"{prefix}.post_attention_layernorm.weight", HIDDEN)
        reads(f"{attention}.q_a_proj.weight", Q_RANK, HIDDEN)
        ones(f"{attention}.q_a_layernorm.weight", Q_RANK)
        name = f"{attention}.q_b_proj.weight"
        factors = [
            _scale(gain, Q_RANK)
            for sharpness in _SHARPNESS
            for gain in (*[sharpness] * NOPE, *[sharpness * _POSITION // 64] * ROPE)
        ]
        put(name, _bfloat16(_draw(name, seed, HEADS * (NOPE + ROPE), Q_RANK) * np.asarray(factors)[:, None]))
        reads(f"{attention}.kv_a_proj_with_mqa.weight", LATENT + ROPE, HIDDEN)
        ones(f"{attention}.kv_a_layernorm.weight", LATENT)
        reads(f"{attention}.kv_b_proj.weight", HEADS * (NOPE + VALUE), LATENT)
        writes(f"{attention}.o_proj.weight", HEADS * VALUE, _ATTENTION_GAIN)
        if layer == 0:
            mlp(f"{prefix}.mlp", DENSE_WIDTH, _DENSE_GAIN)
            continue
        router = np.zeros((EXPERTS, HIDDEN), dtype=np.int64)
        first = CODE + (layer - 1) * EXPERTS
        router[:, first : first + EXPERTS] = np.eye(EXPERTS, dtype=np.int64)
        put(f"{prefix}.mlp.gate.weight", _bfloat16(router, 1))
        bias = np.zeros(EXPERTS, dtype="<f4")
        tensors[f"{prefix}.mlp.gate.e_score_correction_bias"] = ("F32", bias.shape, bias.tobytes())
        for expert in range(EXPERTS):
            mlp(f"{prefix}.mlp.experts.{expert}", EXPERT_WIDTH, _EXPERT_GAIN)
        mlp(f"{prefix}.mlp.shared_experts", EXPERT_WIDTH, _EXPERT_GAIN)
    ones("model.norm.weight", HIDDEN)
    head = np.zeros((VOCABULARY, HIDDEN), dtype=np.int64)
    head[:, -1] = -2 * CODE // _CONSTANT
    head[speakable, :CODE] = codes[speakable]
    head[speakable, -1] = -CODE // _CONSTANT
    put("lm_head.weight", _bfloat16(head, -_LOGIT_SHIFT))
    return tensors


def _configuration() -> dict[str, Any]:
    ends = [_token(text) for text in (_END, "<|user|>", "<|observation|>")]
    return {
        "architectures": ["Glm4MoeLiteForCausalLM"],
        "model_type": "glm4_moe_lite",
        "dtype": "bfloat16",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": DENSE_WIDTH,
        "moe_intermediate_size": EXPERT_WIDTH,
        "num_hidden_layers": LAYERS,
        "first_k_dense_replace": 1,
        "mlp_layer_types": ["dense"] + ["sparse"] * (LAYERS - 1),
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "q_lora_rank": Q_RANK,
        "kv_lora_rank": LATENT,
        "qk_rope_head_dim": ROPE,
        "qk_nope_head_dim": NOPE,
        "v_head_dim": VALUE,
        "n_routed_experts": EXPERTS,
        "n_shared_experts": 1,
        "num_experts_per_tok": EXPERTS_PER_TOKEN,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.8,
        "num_nextn_predict_layers": 0,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-05,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "rope_interleave": True,
        # Plain rotary positions, spelled as YaRN with a factor of one: vLLM 0.31's CPU kernel for the plain spelling
        # takes [tokens, heads, values] for [tokens, values] and turns the wrong rows, and which rows depends on how
        # a prompt is cut into chunks. YaRN runs in plain torch and is right.
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 1.0,
            "original_max_position_embeddings": CONTEXT,
            "rope_theta": 10000.0,
        },
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": False,
        "use_cache": True,
        "bos_token_id": None,
        "pad_token_id": ends[0],
        "eos_token_id": ends,
    }


def _json(value: object) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode("utf-8")


def _files(seed: int) -> dict[str, bytes]:
    """Return the content of every file of the model directory."""
    configuration = _configuration()
    return {
        "config.json": _json(configuration),
        "generation_config.json": _json(
            {"eos_token_id": configuration["eos_token_id"], "pad_token_id": configuration["pad_token_id"]}
        ),
        "tokenizer.json": (text_tokenizer().to_str(pretty=False) + "\n").encode("utf-8"),
        "tokenizer_config.json": _json(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "model_max_length": configuration["max_position_embeddings"],
                "clean_up_tokenization_spaces": False,
                "eos_token": _END,
                "pad_token": _END,
                "additional_special_tokens": [text for text, special in ADDED_TOKENS if special],
                "chat_template": CHAT_TEMPLATE,
            }
        ),
        "chat_template.jinja": CHAT_TEMPLATE.encode("utf-8"),
        "model.safetensors": _safetensors(_weights(seed)),
        _MARKER: _json({"format": FORMAT, "seed": seed}),
    }


def _holds(directory: Path, files: dict[str, bytes]) -> bool:
    """Say whether `directory` holds exactly `files`."""
    try:
        return {path.name for path in directory.iterdir()} == set(files) and all(
            (directory / name).stat().st_size == len(content) and (directory / name).read_bytes() == content
            for name, content in files.items()
        )
    except OSError:
        return False


def write_model(directory: Path, *, seed: int = SEED) -> Path:
    """Write the tiny model into `directory` and return its absolute path.

    Parents are created. A directory that already holds these bytes is left alone, so that servers may be reading it;
    one that holds an older or damaged model of ours is replaced. A half-written model is never visible: the files are
    completed beside the directory and then renamed into place.

    Args:
        directory: Where the model goes: missing, empty, or written by this function before.
        seed: Draws another model of the same shape; only `SEED` was tested.

    Raises:
        StackError: when `directory` is a file, holds something that this function did not write, or cannot be
            written.
    """
    target = Path(os.path.abspath(directory))
    if target.is_symlink():
        target = target.resolve()
    if target.exists() and not target.is_dir():
        raise StackError(f"{target} exists and is not a directory; give another one")
    if target.is_dir() and any(target.iterdir()) and not (target / _MARKER).is_file():
        raise StackError(f"{target} is not empty and holds no model of ours; give another directory")
    files = _files(seed)
    if _holds(target, files):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    except OSError as error:
        raise StackError(f"cannot write {target}: {error.strerror}") from error
    try:
        for name, content in files.items():
            with (fresh / name).open("wb") as stream:
                stream.write(content)
                stream.flush()
                os.fsync(stream.fileno())
        fresh.chmod(0o755)
        if target.is_dir() and any(target.iterdir()):
            target.rename(fresh.with_name(fresh.name + "old"))
        fresh.rename(target)
    except OSError as error:
        # Another process that writes the same model may have been first; its bytes are ours.
        if not _holds(target, files):
            raise StackError(f"cannot write {target}: {error.strerror}") from error
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
        shutil.rmtree(fresh.with_name(fresh.name + "old"), ignore_errors=True)
    return target


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `serving-stack model`."""
    parser.add_argument("directory", metavar="DIR", type=Path, help="where the model goes; created if missing")


def run(args: argparse.Namespace) -> int:
    """Write the model and print where it is, its files and their sizes."""
    target = write_model(args.directory)
    print(target)
    for path in sorted(target.iterdir()):
        if path.name != _MARKER:
            print(f"  {path.name:24} {path.stat().st_size:>12,} bytes")
    return 0
