"""What is taken from JAX's private parts, and which versions are accepted."""

import warnings

import pytest

from morphax import _jax


def test_an_old_jax_is_refused():
    """With the line that mends it."""
    with pytest.raises(ImportError) as error:
        _jax.check_version("0.9.9")
    assert str(error.value) == (
        "morphax needs jax>=0.10.2, but jax 0.9.9 is installed: older releases drive a Trace in another way. "
        "Run `pip install --upgrade jax jaxlib`."
    )


@pytest.mark.parametrize("version", ["0.10.2", "0.11.0", "0.12.0.1", "0.12.0.1.dev20261101"])
def test_tested_versions_are_silent(version):
    """No warning from the floor to the newest tested one."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _jax.check_version(version)


def test_a_newer_jax_gives_one_warning():
    """It may work, and may not."""
    with pytest.warns(UserWarning, match=r"morphax was tested up to jax 0.12.0.1; jax 0.13.0 is newer") as seen:
        _jax.check_version("0.13.0")
    assert len(seen) == 1
