"""Quantizes a sentence encoder to int8 and fine-tunes it with LoRA, without touching the encoder.

The encoder in `minilm.py` is plain `jax.numpy`: it knows nothing of int8 or of LoRA. Morphax runs it on weights that
are something other than arrays, on the way forward and through the gradient.

The task is to predict the valence of a word, from -4 (most negative) to 4 (most positive), as ten raters gave it for
the lexicon of VADER (Hutto and Gilbert, "VADER: A Parsimonious Rule-based Model for Sentiment Analysis of Social Media
Text", 2014). Run

    python examples/quickstart.py

or, for a small version in some twenty seconds, `python examples/quickstart.py --fast`.
"""

import argparse
import time
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import minilm
import numpy as np

import morphax as mx

try:
    import optax
    from matplotlib.figure import Figure
    from tqdm import tqdm
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f"the package {error.name} is missing; run `pip install {error.name}`") from error

LENGTH = 8  # tokens an entry; all but ten entries of the lexicon fit
HELD_OUT = 0.15
PART = 1024  # entries that are embedded at once, to bound the memory
EVALUATIONS = 10  # of the held-out loss, spread over the training
GRAY, BLUE, ORANGE = "#7b8794", "#2563eb", "#d9480f"


def main(argv=None):
    """Runs the four steps: quantize, fine-tune, explain, draw."""
    args = parse_arguments(argv)
    start = time.perf_counter()
    dense = minilm.load()
    minilm.check_similarities(dense)
    data = load_data(args.entries, args.seed)

    quantized = quantize(dense)
    compare(dense, quantized, data["held out"])
    model = add_head(add_lora(quantized, args.rank, args.alpha, jax.random.key(args.seed)), data["train"])
    sizes = {"dense": count_bytes(dense), "int8": count_bytes(quantized), "lora": count_bytes(model)}
    report_sizes(sizes)
    model, losses = train(model, data, args)
    report_losses(losses, predict_mean(data))
    report_rules(model, data["held out"])
    draw(losses, predict_mean(data), sizes, args.out)
    print(f"\nWrote {args.out} after {time.perf_counter() - start:.0f} s")


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows the defaults, and leaves the line breaks of the description alone."""


def parse_arguments(argv):
    """Reads the command line, and refuses values that cannot work."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--rank", type=int, default=8, help="rank of the LoRA updates")
    parser.add_argument("--alpha", type=float, default=8.0, help="the updates are scaled by alpha / rank")
    parser.add_argument("--epochs", type=int, default=2, help="passes over the entries")
    parser.add_argument("--entries", type=int, default=7506, help="how many entries of the lexicon to use")
    parser.add_argument("--batch", type=int, default=64, help="entries a step")
    parser.add_argument("--learning-rate", type=float, default=2e-3, help="learning rate at the start")
    parser.add_argument("--seed", type=int, default=0, help="seed of the split and of the training")
    parser.add_argument("--out", type=Path, default=Path("quickstart.png"), help="where the picture goes")
    parser.add_argument("--fast", action="store_true", help="a small version: 400 entries, 3 epochs")
    args = parser.parse_args(argv)
    check_arguments(parser, args)
    if args.fast:
        args.entries, args.epochs = 400, 3
    return args


def check_arguments(parser, args):
    """Refuses what would fail later on, and says what to type instead."""
    least = {"rank": 1, "alpha": 1e-3, "epochs": 1, "entries": 200, "batch": 1, "learning_rate": 1e-6, "seed": 0}
    for name, bound in least.items():
        option, value, usual = f"--{name.replace('_', '-')}", getattr(args, name), parser.get_default(name)
        if not value >= bound:  # written so that nan is refused too
            parser.error(f"{option} must be at least {bound}, got {value}; type for example `{option} {usual}`")
    if args.out.suffix != ".png" or not args.out.parent.is_dir():
        parser.error(f"--out must be a .png file in a folder that exists, got {args.out}; type `--out quickstart.png`")


def load_data(entries, seed):
    """Reads the lexicon, tokenizes it and splits it.

    Args:
        entries: How many entries to draw.
        seed: The seed of the draw and of the split.

    Returns:
        A dict from "train" and "held out" to `(ids, mask, valence)`.
    """
    words, valence = read_lexicon()
    random = np.random.default_rng(seed)
    chosen = random.permutation(len(words))[:entries]
    words, valence = [words[index] for index in chosen], valence[chosen]
    ids, mask = minilm.tokenize(minilm.load_tokenizer(), words, LENGTH)
    held = hold_out(words, random)
    return {name: (ids[rows], mask[rows], valence[rows]) for name, rows in {"train": ~held, "held out": held}.items()}


def read_lexicon():
    """Reads the words and their mean valences from the lexicon of VADER."""
    path = minilm.find_package("vaderSentiment") / "vader_lexicon.txt"
    lines = [line.split("\t") for line in path.read_text(encoding="utf-8").splitlines()]
    valences = {word: float(mean) for word, mean, *_ in lines}
    return list(valences), np.array(list(valences.values()), np.float32)


def hold_out(words, random):
    """Chooses the held-out words.

    Words with the same first four letters stay on the same side: to predict "weepier" having seen "weepy" is no test.
    """
    stems, stem_of_word = np.unique([word[:4] for word in words], return_inverse=True)
    return (random.random(len(stems)) < HELD_OUT)[stem_of_word]


def quantize(params):
    """Replaces the weight matrices and the embedding tables by int8, with one scale a row."""
    return jax.tree.map(lambda w: mx.arrays.QuantizedArray.quantize(w, axis=-1) if w.ndim == 2 else w, params)


def compare(dense, quantized, batch):
    """Prints the cosines of the int8 embeddings with the dense ones, and refuses an encoder that lost its way.

    Raises:
        RuntimeError: If the mean cosine is below 0.99.
    """
    ids, mask, _ = batch
    encode = jax.jit(mx.wrap(minilm.encode))
    cosines = jnp.sum(encode(dense, ids, mask) * encode(quantized, ids, mask), axis=-1)
    print(f"\nCosine of int8 with dense embeddings: mean {cosines.mean():.4f}, least {cosines.min():.4f}")
    if cosines.mean() < 0.99:
        raise RuntimeError(f"int8 moved the embeddings: their mean cosine is {cosines.mean():.4f}, below 0.99")


def add_lora(params, rank, alpha, key):
    """Puts a LoRA update over each linear weight of the transformer layers; the embedding tables stay as they are."""
    weights, treedef = jax.tree.flatten(params["encoder"], is_leaf=is_quantized)
    keys = jax.random.split(key, len(weights))
    weights = [
        mx.arrays.LoraArray.init(w, rank, key=key, alpha=alpha) if is_quantized(w) else w
        for w, key in zip(weights, keys, strict=True)
    ]
    return {**params, "encoder": treedef.unflatten(weights)}


def is_quantized(x):
    """Whether `x` is an int8 weight."""
    return isinstance(x, mx.arrays.QuantizedArray)


def is_lora(x):
    """Whether `x` is a weight with a LoRA update."""
    return isinstance(x, mx.arrays.LoraArray)


def add_head(params, batch):
    """Puts a linear head on the encoder, fitted by ridge regression to the embeddings before fine-tuning.

    Training so starts from what the frozen encoder can do, and what it gains from there is due to LoRA.
    """
    ids, mask, valence = batch
    encode = jax.jit(mx.wrap(minilm.encode))
    parts = [slice(start, start + PART) for start in range(0, len(ids), PART)]
    embeddings = jnp.concatenate([encode(params, ids[part], mask[part]) for part in parts])
    center = embeddings.mean(axis=0)
    x, y = embeddings - center, valence - valence.mean()
    weight = jnp.linalg.solve(x.T @ x + 10 * jnp.eye(x.shape[1]), x.T @ y)
    return {"encoder": params, "head": {"weight": weight, "bias": valence.mean() - center @ weight}}


def trained_leaves(model):
    """Marks what training changes: the factors `a` and `b` of each LoRA update, and the head."""

    def mark(leaf):
        frozen = jax.tree.map(lambda _: False, leaf)
        return eqx.tree_at(lambda lora: (lora.a, lora.b), frozen, (True, True)) if is_lora(leaf) else frozen

    return {"encoder": jax.tree.map(mark, model["encoder"], is_leaf=is_lora), "head": True}


def predict(model, ids, mask):
    """Predicts one valence for each entry."""
    return mx.wrap(minilm.encode)(model["encoder"], ids, mask) @ model["head"]["weight"] + model["head"]["bias"]


def loss(trainable, frozen, ids, mask, valence):
    """The mean squared error of the predictions."""
    return jnp.mean((predict(eqx.combine(trainable, frozen), ids, mask) - valence) ** 2)


def train(model, data, args):
    """Trains the LoRA factors and the head.

    Args:
        model: The encoder with its LoRA updates, and the head.
        data: What `load_data` returns.
        args: The command line.

    Returns:
        The trained model, and the losses as a dict from "train" and "held out" to pairs `(step, loss)`.
    """
    trainable, frozen = eqx.partition(model, trained_leaves(model))
    report_trainable(trainable, model)
    steps = batches(len(data["train"][0]), args)
    optimizer = optax.adam(optax.cosine_decay_schedule(args.learning_rate, len(steps)))
    state, step, evaluate = optimizer.init(trainable), make_step(optimizer), jax.jit(loss)
    losses = {"train": [], "held out": [(0, float(evaluate(trainable, frozen, *data["held out"])))]}
    with tqdm(total=len(steps), desc="Fine-tuning", unit="step") as progress:
        for part in np.array_split(steps, min(EVALUATIONS, len(steps))):
            for rows in part:
                batch = [array[rows] for array in data["train"]]
                trainable, state, value = step(trainable, state, frozen, batch)
                losses["train"].append((progress.n + 1, float(value)))
                progress.update()
            losses["held out"].append((progress.n, float(evaluate(trainable, frozen, *data["held out"]))))
            progress.set_postfix_str(f"held-out loss {losses['held out'][-1][1]:.3f}")
    return eqx.combine(trainable, frozen), losses


def make_step(optimizer):
    """Builds the function that takes one training step; only its two halves are compiled."""
    gradient = jax.jit(jax.value_and_grad(loss))
    update = jax.jit(optimizer.update)

    def step(trainable, state, frozen, batch):
        value, grads = gradient(trainable, frozen, *batch)
        updates, state = update(grads, state)
        return eqx.apply_updates(trainable, updates), state, value

    return step


def batches(count, args):
    """The rows of each training step; an epoch is a permutation that leaves out an incomplete batch."""
    random = np.random.default_rng(args.seed)
    size = min(args.batch, count)
    epochs = [random.permutation(count)[: count // size * size].reshape(-1, size) for _ in range(args.epochs)]
    return np.concatenate(epochs)


def count_bytes(tree):
    """The bytes of all arrays in a tree."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def report_sizes(sizes):
    """Prints the bytes before and after."""
    labels = {"dense": "dense float32", "int8": "int8", "lora": "int8 + LoRA + head"}
    for name, label in labels.items():
        print(f"{label:>20}: {sizes[name]:>11,} bytes  ({sizes[name] / sizes['dense']:.1%})")


def report_trainable(trainable, model):
    """Prints which share of the numbers training changes."""
    part, whole = (sum(leaf.size for leaf in jax.tree.leaves(tree)) for tree in (trainable, model))
    print(f"\nTrainable: {part:,} of {whole:,} numbers ({part / whole:.2%})")


def report_losses(losses, baseline):
    """Prints the held-out loss before and after.

    Raises:
        RuntimeError: If fine-tuning did not lower it.
    """
    before, after = losses["held out"][0][1], losses["held out"][-1][1]
    print("Held-out mean squared error")
    print(f"  predicting the mean: {baseline:.3f}")
    print(f"  before fine-tuning:  {before:.3f}  (a linear head on the frozen encoder)")
    print(f"  after fine-tuning:   {after:.3f}  ({after / before - 1:+.0%})")
    if after >= before:
        raise RuntimeError("fine-tuning did not lower the held-out loss; try more --entries or a lower --learning-rate")


def predict_mean(data):
    """The held-out mean squared error of predicting the mean of the training entries."""
    return float(np.mean((data["held out"][2] - data["train"][2].mean()) ** 2))


def report_rules(model, batch):
    """Prints the rules that served the encoder and its gradient.

    Raises:
        RuntimeError: If some weight was materialized, or none met a rule.
    """
    trainable, frozen = eqx.partition(model, trained_leaves(model))
    forward = mx.explain(minilm.encode)(model["encoder"], *batch[:2])
    gradient = mx.explain(jax.grad(loss))(trainable, frozen, *batch)
    print(f"\nRules that served the encoder\n{forward}")
    for name, explanation in {"forward": forward, "gradient": gradient}.items():
        served = sum(row.count for row in explanation.rows) - sum(row.count for row in explanation.materialized)
        print(f"{name:>8}: rules served {served} operations, {len(explanation.materialized)} weights materialized")
        if explanation.materialized or not served:
            raise RuntimeError(f"the {name} made a weight dense, or met none:\n{explanation}")


def draw(losses, baseline, sizes, path):
    """Draws the losses and the sizes side by side."""
    figure = Figure(figsize=(11, 4.4), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.12)
    left, right = figure.subplots(1, 2, width_ratios=(1.6, 1))
    draw_losses(left, losses, baseline)
    draw_sizes(right, sizes)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_title(axes.get_title(), fontsize=12, fontweight="bold", pad=12)
        axes.grid(axis="y", color="#e4e7eb")
        axes.set_axisbelow(True)
    figure.savefig(path, dpi=150)


def draw_losses(axes, losses, baseline):
    """Draws the loss of each step, its running mean, the held-out loss, and that of predicting the mean."""
    steps, values = np.array(losses["train"]).T
    width = max(1, len(steps) // 12)
    smooth = np.convolve(values, np.ones(width) / width, mode="valid")
    axes.plot(steps, values, color=GRAY, alpha=0.3, linewidth=0.8)
    axes.plot(steps[width - 1 :], smooth, color=GRAY, linewidth=2, label="train, running mean")
    axes.plot(*np.array(losses["held out"]).T, color=ORANGE, linewidth=2, marker="o", label="held out", clip_on=False)
    axes.axhline(baseline, color="black", linestyle="--", linewidth=1, label="held out, predicting the mean")
    axes.set(title="Fine-tuning on the valence of words", xlabel="step", ylabel="mean squared error")
    axes.set(xlim=(0, steps[-1]), ylim=(0, 1.25 * baseline))
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(frameon=False, loc="upper right", ncols=3, fontsize=9)


def draw_sizes(axes, sizes):
    """Draws the sizes as bars, with what LoRA and the head add on top of int8."""
    labels = ["dense float32", "int8", "int8 + LoRA\n+ head"]
    megabytes = np.array([sizes["dense"], sizes["int8"], sizes["int8"]]) / 1e6
    added = np.array([0, 0, sizes["lora"] - sizes["int8"]]) / 1e6
    axes.bar(labels, megabytes, color=[GRAY, BLUE, BLUE], width=0.6)
    top = axes.bar(labels, added, bottom=megabytes, color=ORANGE, width=0.6)
    axes.bar_label(top, labels=[f"{size:.1f} MB" for size in megabytes + added], padding=3)
    axes.set(title="Size of the weights", ylabel="megabytes", ylim=(0, 1.1 * megabytes.max()))


if __name__ == "__main__":
    main()
