"""The warnings that end a test are those that our own modules cause."""

import types
import warnings

import pytest


def warn_from(module: str) -> None:
    """Warn as code of `module` would."""
    source = types.ModuleType(module)
    exec("import warnings\ndef warn(): warnings.warn('old', FutureWarning, stacklevel=1)", source.__dict__)
    source.warn()


@pytest.mark.parametrize(
    "module", ["unstable_lite.learner.model", "bench", "test_run", "fakes.lying_engines", "custom_env"]
)
def test_warning_of_our_own_module_is_an_error(module):
    with pytest.raises(FutureWarning, match="old"):
        warn_from(module)


@pytest.mark.parametrize("module", ["transformers.modeling_utils", "peft.tuners", "unstable_lite_plugin", "benchmark"])
def test_warning_of_a_third_party_is_shown_and_not_fatal(module):
    with warnings.catch_warnings(record=True) as shown:
        warn_from(module)
    assert [str(warning.message) for warning in shown] == ["old"]


def test_unclosed_resource_is_an_error_in_any_module():
    with pytest.raises(ResourceWarning):
        warnings.warn_explicit("unclosed", ResourceWarning, "socket.py", 1, module="third_party")
