"""The `[engine]` table of a settings file, for the embedded engine: what is wrong is named before a file is read."""

from typing import Any

import pytest

from groupstate.engines.model_file import engine_from_options
from groupstate.errors import BadSettings


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"slots_max": "3"}, "[engine]: slots_max is '3'; it must be an integer"),
        ({"threads": 1.5}, "[engine]: threads is 1.5; it must be an integer"),
        ({"heads": True}, "[engine]: heads is True; it must be an integer"),
        ({"seed": "x"}, "[engine]: seed is 'x'; it must be an integer"),
        ({"device": 0}, "[engine]: device is 0; it must be a string"),
        ({"model": 3}, "[engine]: model is 3; it must be a string"),
        ({"modell": "m.pt"}, "[engine] has no setting 'modell'; did you mean 'model'?"),
        ({"model": ""}, "[engine]: the engine 'torch' needs a file of weights: model = \"model.pt\" (--model)"),
    ],
)
def test_an_option_that_cannot_be_is_named(options: dict[str, Any], text: str) -> None:
    with pytest.raises(BadSettings) as refused:
        engine_from_options({"model": "none.pt", **options}, "[engine]")

    assert str(refused.value) == text
